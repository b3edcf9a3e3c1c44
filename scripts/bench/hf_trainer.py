"""Hugging Face's Trainer on dsrun against the same on DeepSpeed: a step at each ZeRO stage, the import, a call.

    python scripts/bench/hf_trainer.py [--peer-python PYTHON] [--only small import ...] [--runs 15] [--json FILE]
    python scripts/bench/hf_trainer.py --before CHECKOUT --only small          # what a change of dsrun did

One script, hf_trainer_parts/train.py, runs unchanged on all: on dsrun in drop-in mode, on DeepSpeed, and on plain DDP
as the floor. Two ranks, one thread each, fp32, 128 tokens a rank. All contenders of a stage live at the same time and
take turns, one step at a time, by a callback of the Trainer; who comes first changes each round. A figure is the
slowest rank's time from a step's beginning to the next one's. Ratios are of figures within a round. Losses must agree,
or the section fails, as it does where a contender does not train with what it is named after.

Sections:
    small     10.6M parameters, stages 0 to 3, and 2 and 3 with offload to the CPU
    large     46.9M parameters, likewise
    import    `import deepspeed` in a process that has torch: seconds and resident bytes
    call      calling the engine as a module, by its `forward`

DeepSpeed belongs into an environment of its own, with the same torch, Transformers and Accelerate, and is left out
without one; its first start compiles for minutes, before anything is measured:
    python -m venv /tmp/ds && DS_BUILD_OPS=0 /tmp/ds/bin/pip install deepspeed==0.19.8 torch transformers accelerate
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_trainer_parts.jobs import CHECKOUT, LARGE, RANKS, SMALL, Contender, Job, Shape, Team, Turn, environment
from sections import measure
from zero_peers.figures import Figures

#: How far logged losses of contenders may lie apart, by the least: sums of gradients in another order. Seen: 4e-7.
_LOSS_TOLERANCE = 1e-4
#: Turns before those that count: buffers are made, and orders of layers recorded, in the first ones.
_WARM_UP = 3
#: A step of dsrun by one of `before`: no change, within what a median varies by on a quiet machine.
_NO_SLOWER = 1.03
_MIB = 2**20
_CPU = ", CPU of all ranks"
_PARTS = Path(__file__).resolve().parent / "hf_trainer_parts"
#: Nobody listens at the port: the part that makes an engine makes its group first.
_LONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
_PACKAGES = ("deepspeed", "torch", "transformers", "accelerate")
_CAVEATS = (
    "Gloo and shared memory on one host, no GPU: it says nothing of NCCL, nor of steps that a GPU's work covers.",
    "One sample of 128 tokens a rank: more tokens bring all ratios nearer to 1.",
    "Ranks are started alike, without a launcher: what dsrun's or DeepSpeed's does about cores is in no figure.",
    "The optimizer is the Trainer's own, torch's fused AdamW. With offload, Accelerate takes DeepSpeedCPUAdam instead:"
    " DeepSpeed's is compiled for this processor, dsrun's compiles nothing.",
    "Sizes of buckets are each one's defaults. `auto`, as guides have it, makes them tiny for a small model, and"
    " DeepSpeed slower.",
    "dsrun's face imports names on their first use, so its `import deepspeed` alone flatters it: see the row with the"
    " engine's class too.",
    "With offload there is no device to offload from: it is the bookkeeping that is compared.",
    "Wall time says little where others use the machine too; CPU time of all ranks then changes less.",
)


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        peer_python: interpreter that has DeepSpeed; None: without it.
        runs: rounds that count.
        stages: ZeRO stages to measure.
        before: another checkout of dsrun, the contender `before`; None: without it.
    """

    peer_python: str | None
    runs: int
    stages: tuple[int, ...]
    before: Path | None = None

    @property
    def faces(self) -> tuple[Contender, ...]:
        """All that stand for DeepSpeed."""
        ours: tuple[Contender, ...] = ("dsrun",) if self.before is None else ("dsrun", "before")
        return ours if self.peer_python is None else (*ours, "deepspeed")

    def python(self, contender: Contender) -> str:
        """Returns the interpreter that a contender runs under."""
        if contender != "deepspeed":
            return sys.executable
        assert self.peer_python is not None, "it is no contender then"
        return self.peer_python

    def checkout(self, contender: Contender) -> Path:
        """Returns the checkout whose dsrun a contender finds."""
        return self.before if contender == "before" and self.before is not None else CHECKOUT

    def team(self, job: Job) -> Team:
        """Returns the ranks of a job."""
        return Team(job, python=self.python(job.contender), checkout=self.checkout(job.contender))


# Sections


def steps_of(options: Options, *, shape: Shape, stage: int) -> list[Figures]:
    """Times steps at a stage, of all that train so."""
    steps = _WARM_UP + options.runs
    offloads = (False, True) if stage >= 2 else (False,)
    jobs = [Job(face, stage, offload, shape, steps) for offload in offloads for face in options.faces]
    taken = take_turns(options, [*jobs, Job("ddp", stage, False, shape, steps)])
    title = f"stage {stage}, {RANKS} ranks, fp32, {shape.numel / 1e6:.1f}M parameters, {shape.tokens} tokens a rank"
    seconds = Figures(f"A step of the Trainer, {title}", "s")
    for row, turns in taken.items():
        within_s = statistics.median(turn.step_s for turn in turns)
        loss = next((turn.losses[-1] for turn in reversed(turns) if turn.losses), None)
        note = f"to on_step_end {within_s:.3g}" + ("" if loss is None else f"; last loss {loss:.6f}")
        for turn in turns:
            seconds.add(row, turn.turn_s, note)
    for row, turns in taken.items():
        for turn in turns:
            seconds.add(f"{row}{_CPU}", turn.cpu_s)
    return [seconds, _ratios(f"Ratios within a round, {title}", seconds)]


def _ratios(title: str, seconds: Figures) -> Figures:
    table = Figures(title, "x")
    for kind in ("", _CPU):
        for mine, other, most in (
            ("dsrun", "deepspeed", 1.0),
            ("dsrun, offload", "deepspeed, offload", 1.0),
            ("dsrun", "before", _NO_SLOWER),
            ("dsrun, offload", "before, offload", _NO_SLOWER),
            ("dsrun", "ddp", None),
            ("dsrun, offload", "ddp", None),
            ("deepspeed", "ddp", None),
            ("deepspeed, offload", "ddp", None),
        ):
            pair = f"{mine}{kind}", f"{other}{kind}"
            if not all(row in seconds.values for row in pair):
                continue
            row = f"{mine} by {other}{kind}"
            ratios = [a / b for a, b in zip(*(seconds.values[name] for name in pair), strict=True)]
            spread = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios
            for ratio in ratios:
                table.add(row, ratio, f"middle half {spread[0]:.3f} to {spread[-1]:.3f}")
            if most is not None:
                table.demand(f"{row} <= {most:g}", table.median(row), most=most)
    if "deepspeed" not in seconds.values:
        table.demand_ratio("dsrun", "deepspeed", most=1.0)  # says that it was not measured
    return table


def take_turns(options: Options, jobs: Sequence[Job]) -> dict[str, list[Turn]]:
    """Returns the turns that count of each job by its row: all in turn, once a round.

    Raises:
        RuntimeError: contenders log other losses, or none; or one of them fails.
    """
    counted: dict[str, list[Turn]] = {job.row: [] for job in jobs}
    losses: dict[str, list[float]] = {job.row: [] for job in jobs}
    with ExitStack() as stack:
        teams = [stack.enter_context(options.team(job)) for job in jobs]
        for team in teams:
            team.ready()
        for round_ in range(jobs[0].steps):
            # Whoever comes first finds another machine than who comes after it: so nobody always does.
            first = round_ % len(teams)
            for team in [*teams[first:], *teams[:first]]:
                turn = team.turn()
                losses[team.job.row] += turn.losses
                if round_ >= _WARM_UP:
                    counted[team.job.row].append(turn)
        for team in teams:
            team.finish()
    demand_same_losses(losses)
    return counted


def demand_same_losses(losses: dict[str, list[float]]) -> None:
    """Sees that contenders train the same model.

    Args:
        losses: losses in order, by the name of the contender.

    Raises:
        RuntimeError: they are other losses, more or fewer, or none.
    """
    logged = {len(each) for each in losses.values()}
    if len(logged) != 1 or logged == {0}:
        raise RuntimeError(f"contenders logged losses at other steps, or none: {losses}")
    for together in zip(*losses.values(), strict=True):
        finite = all(map(math.isfinite, together))
        if not finite or max(together) - min(together) > _LOSS_TOLERANCE * min(together):
            raise RuntimeError(f"contenders do not train the same model: losses {losses}")


def first_import(options: Options) -> list[Figures]:
    """Times the import, and reads what it leaves resident, in fresh processes."""
    seconds = Figures("`import deepspeed` in a process that has torch", "s")
    resident = Figures("Resident after `import deepspeed`, over what it was with torch", "MiB")
    for round_ in range(options.runs + 1):
        for face in options.faces:
            found = _answer(options, face, "first_import.py")
            if not round_:
                continue
            seconds.add(face, found["import_s"], found["version"])
            seconds.add(f"{face}, with initialize and DeepSpeedEngine", found["engine_s"])
            resident.add(face, found["import_bytes"] / _MIB)
            resident.add(f"{face}, with initialize and DeepSpeedEngine", found["engine_bytes"] / _MIB)
    seconds.demand("dsrun <= 0.03", seconds.median("dsrun"), most=0.03)
    resident.demand("dsrun <= 10", resident.median("dsrun"), most=10.0)
    for table in (seconds, resident):
        table.demand_ratio("dsrun", "deepspeed", most=1.0)
    return [seconds, resident]


def call(options: Options) -> list[Figures]:
    """Times calls of an engine whose model does nothing."""
    table = Figures("A call without gradients, one rank, stage 0, a model that returns its input", "us")
    for _ in range(max(1, options.runs // 5)):
        for face in options.faces:
            found = _answer(options, face, "call.py", str(options.runs))
            for name, values in found.items():
                for value in values:
                    table.add(f"{face}, {name}", value)
            for whole, forward in zip(found["engine(x)"], found["engine.forward(x)"], strict=True):
                table.add(f"{face}, engine(x) less engine.forward(x)", whole - forward)
    row = "dsrun, engine(x) less engine.forward(x)"
    table.demand(f"{row} <= 20", table.median(row), most=20.0)
    table.demand_ratio("dsrun, engine(x)", "deepspeed, engine(x)", most=1.0)
    return [table]


def _answer(options: Options, face: Contender, script: str, *words: str) -> dict[str, Any]:
    """Returns what one of the parts prints, on its last line."""
    checkout = options.checkout(face)
    site = () if face == "deepspeed" else (str(checkout / "src" / "dsrun" / "as_deepspeed" / "site"),)
    done = subprocess.run(
        [options.python(face), str(_PARTS / script), *words],
        env={**environment(options.python(face), checkout, site), **_LONE_RANK},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{script} with {face}: exit code {done.returncode}; it said:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


Section = Callable[[Options], list[Figures]]
_SHAPES = {"small": SMALL, "large": LARGE}
_OTHERS: dict[str, Section] = {"import": first_import, "call": call}


def sections_of(names: Sequence[str], stages: Sequence[int]) -> dict[str, Section]:
    """Returns what is to be measured, each stage for itself: what is done is printed, and kept.

    Args:
        names: names of sections.
        stages: ZeRO stages.
    """
    return {
        name if stage is None else f"{name}, stage {stage}": (
            _OTHERS[name] if stage is None else partial(steps_of, shape=_SHAPES[name], stage=stage)
        )
        for name in names
        for stage in (stages if name in _SHAPES else [None])
    }


def _packages(python: str) -> dict[str, str]:
    """Returns the versions of what an interpreter has installed of `_PACKAGES`."""
    program = (
        "import json, sys; from importlib.metadata import distributions; "
        "print(json.dumps({d.name: d.version for d in distributions() if d.name in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", program, *_PACKAGES], check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def _caveats(options: Options) -> list[str]:
    """Returns what has to be known before the figures are read."""
    mine = _packages(sys.executable)
    lines = [
        f"python {platform.python_version()}, {', '.join(f'{name} {version}' for name, version in mine.items())}; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the beginning",
        *_CAVEATS,
    ]
    if options.peer_python is None:
        return [*lines, "DeepSpeed is left out: no --peer-python."]
    theirs = _packages(options.peer_python)
    lines.append(f"DeepSpeed runs with {', '.join(f'{name} {version}' for name, version in theirs.items())}.")
    return lines + [
        f"UNLIKE {name}: {mine.get(name)} for dsrun, {theirs.get(name)} for DeepSpeed."
        for name in _PACKAGES[1:]
        if mine.get(name, "").partition("+")[0] != theirs.get(name, "").partition("+")[0]
    ]


def main() -> None:
    """Runs the sections that are asked for, and prints each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", default=os.environ.get("DSRUN_PEER_PYTHON"), help="has DeepSpeed; also $DSRUN_PEER_PYTHON"
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of dsrun, as a contender")
    parser.add_argument(
        "--only", nargs="+", choices=[*_SHAPES, *_OTHERS], default=[*_SHAPES, *_OTHERS], metavar="SECTION"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="2 rounds, stages 1 and 3, without DeepSpeed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    before: Path | None = args.before
    if before is not None and not (before / "src" / "dsrun" / "as_deepspeed").is_dir():
        parser.error(f"--before {before}: no checkout of dsrun that can stand for DeepSpeed: no src/dsrun/as_deepspeed")
    if args.runs < 2:
        parser.error(f"--runs {args.runs}: at least 2, or no loss is logged")
    options = Options(
        peer_python=None if args.quick else args.peer_python,
        runs=2 if args.quick else args.runs,
        stages=(1, 3) if args.quick else tuple(args.stages),
        before=before and before.resolve(),
    )
    for python, needed in ((sys.executable, _PACKAGES[1:]), (options.peer_python, _PACKAGES)):
        lacking = [] if python is None else sorted(set(needed) - _packages(python).keys())
        if lacking:
            parser.error(f"{python} has no {', '.join(lacking)}; --help says what to install")
    caveats = _caveats(options)
    print("\n".join([*(f"- {line}" for line in caveats), ""]), flush=True)
    if options.peer_python is not None:
        # What it compiles it keeps, and no figure shall hold a compiler.
        with options.team(Job("deepspeed", 3, True, SMALL, 1)) as team:
            team.ready()
    if args.json is not None:
        args.json.unlink(missing_ok=True)
    sections = sections_of(args.only, options.stages)
    try:
        measure(sections, list(sections), options, runs=options.runs, json_file=args.json)
    finally:
        if args.json is not None and args.json.exists():
            found = json.loads(args.json.read_text())
            args.json.write_text(json.dumps({"caveats": caveats, **found}, indent=1))
    print(f"load {os.getloadavg()[0]:.1f} at the end", flush=True)


if __name__ == "__main__":
    main()
