"""The ZeRO core against DeepSpeed and FSDP2: speed, bytes, memory, start, and what it adds to plain torch.

    python scripts/bench/zero.py [--peer-python PYTHON] [--only steps short ...] [--runs 9] [--quick] [--json FILE]
    python scripts/bench/zero.py --before CHECKOUT --only steps short overhead     # what a change of dsrun did

All contenders train one GPT in plain torch (zero_peers/gpt.py) on the same tokens, with torch's fused AdamW and
clipping, one thread a rank, each in processes of its own, which live through the section and take turns, one step at a
time: figures of a round are neighbours in time, and ratios are medians of ratios within a round. A step is the slowest
rank's. Losses must agree, or the section fails. In bf16: dsrun and DeepSpeed keep bf16 parameters and fp32 masters,
FSDP2 fp32 parameters, which it casts when it gathers; all reduce gradients in bf16 and have fp32 moments. `--fp32` is
for processors without AVX-512, whose bf16 products torch computes at a fiftieth of the speed of fp32.

Sections:
    steps     a step of 101M parameters, 2 ranks, bf16, 512 tokens a rank, stages 1 to 3, and the floor under it
    short     the same with 32 tokens a rank, where moving data is most of it
    bytes     calls and bytes through dsrun's collectives in a step, against theory
    memory    most memory resident in a rank, 202M parameters, stages 0 to 3, and what `dsrun plan` foretells
    start     seconds to hand that model over, after import (ours: `dsrun.initialize`)
    alone     a step of one rank by plain torch's, stages 0 to 3, fp32 and bf16
    overhead  processor time a block, forward and backward less plain torch's: 24 blocks of hidden 16, one rank

FSDP2 has neither stage 1 nor 2: `reshard_after_forward=False` stands in for both, and nothing for stage 0. DeepSpeed
belongs into an environment of its own, and is left out without one; its first start compiles for a minute:
    python -m venv /tmp/ds && DS_BUILD_OPS=0 /tmp/ds/bin/pip install torch deepspeed==0.19.8
`before` is dsrun as another checkout of this repository has it (`git worktree add CHECKOUT COMMIT`), under this Python.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sections import measure
from teams.team import Team
from zero_peers.figures import Figures
from zero_peers.job import LARGE, MEDIUM, SHORT, STACK, Job, Shape
from zero_peers.with_dsrun import config_of

#: How far losses of contenders may lie apart: roundings of bf16, in another order.
_LOSS_TOLERANCE = 0.02
#: A step of dsrun by one of `before`: no change, within what a median of nine rounds varies by on a quiet machine.
_NO_SLOWER = 1.03
_MIB = 2**20
_AGREEMENT_BYTES = 64
_CPU = ", CPU of all ranks"
_BENCH = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        peer_python: an interpreter that has DeepSpeed; None: without it.
        runs: rounds that count.
        stages: ZeRO stages to measure.
        before: another checkout of dsrun, the contender `before`; None: without it.
        bf16: whether contenders train in bf16, else in fp32; sections that say which take no notice.
    """

    peer_python: str | None
    runs: int
    stages: tuple[int, ...]
    before: Path | None = None
    bf16: bool = True

    @property
    def dtype(self) -> str:
        """Number format in titles."""
        return "bf16" if self.bf16 else "fp32"

    @property
    def peers(self) -> tuple[str, ...]:
        """The others."""
        return ("fsdp2",) if self.peer_python is None else ("deepspeed", "fsdp2")

    @property
    def ours(self) -> tuple[str, ...]:
        """dsrun, and what it was before."""
        return ("dsrun",) if self.before is None else ("dsrun", "before")

    def team(self, job: Job) -> Team:
        """Returns the ranks of a job."""
        if job.contender == "before":
            assert self.before is not None, "it is no contender then"
            return Team(replace(job, contender="dsrun"), checkout=self.before)
        if job.contender == "deepspeed":
            assert self.peer_python is not None, "it is no peer then"
            return Team(job, python=self.peer_python)
        # In bf16 the floor uses half of it.
        return Team(job, shared_bytes=job.shape.numel * 4 if job.contender == "floor" else 0)


def take_turns(teams: Sequence[tuple[str, Team]], rounds: int, steps: int = 1) -> dict[str, list[dict[str, float]]]:
    """Returns the rounds' steps by row: each team in turn, once a round, after one round that does not count.

    Raises:
        RuntimeError: contenders do not compute the same losses.
    """
    taken: dict[str, list[dict[str, float]]] = {row: [] for row, _ in teams}
    for round_ in range(rounds + 1):
        # Whoever comes first finds another machine than who comes after it: so nobody always does.
        turn = round_ % len(teams)
        for row, team in [*teams[turn:], *teams[:turn]]:
            found = team.step(steps)
            if round_:
                taken[row] += found
    losses = {row: found[0]["loss"] for row, found in taken.items() if not row.startswith("floor")}
    if max(losses.values()) - min(losses.values()) > _LOSS_TOLERANCE:
        raise RuntimeError(f"contenders do not train the same model: losses {losses}")
    return taken


# Sections


def steps(options: Options, shape: Shape = MEDIUM) -> list[Figures]:
    """Times steps of two ranks."""
    return [_steps_of_stage(options, shape, stage) for stage in options.stages if stage]


def short(options: Options) -> list[Figures]:
    """Times steps of few tokens."""
    return steps(options, SHORT)


def _steps_of_stage(options: Options, shape: Shape, stage: int) -> Figures:
    tokens = shape.seq * shape.micro
    table = Figures(f"A step, stage {stage}, 2 ranks, {options.dtype}, {tokens} tokens a rank", "s")
    with ExitStack() as stack:
        teams: list[tuple[str, Team]] = []
        for contender in (*options.ours, *options.peers, "floor"):
            teams.append((contender, stack.enter_context(options.team(Job(contender, stage, 2, shape, options.bf16)))))
        taken = take_turns(teams, options.runs)
    for row, found in taken.items():
        halves = [statistics.median(step[key] for step in found) for key in ("backward_s", "update_s")]
        for step in found:
            table.add(row, step["step_s"], "forward and backward {:.3g}, update {:.3g}".format(*halves))
    # Processor time of both ranks changes less where others use the machine too; there, wall time says little.
    for row, found in taken.items():
        for step in found:
            table.add(f"{row}{_CPU}", step["cpu_s"])
    least = 1.5 if stage == 3 else 1.3
    for kind in ("", _CPU):
        for peer in ("deepspeed", "fsdp2"):
            table.demand_ratio(f"{peer}{kind}", f"dsrun{kind}", least=least)
        table.demand_ratio(f"floor{kind}", f"dsrun{kind}", least=0.9)
        if options.before is not None:
            table.demand_ratio(f"dsrun{kind}", f"before{kind}", most=_NO_SLOWER)
    return table


def traffic(options: Options) -> list[Figures]:
    """Counts calls and bytes of one step; the first step's agreements are not in it."""
    table = Figures(f"Bytes through dsrun's collectives in a step, 2 ranks, {options.dtype}", "MiB")
    for stage in options.stages:
        with options.team(Job("dsrun", stage, 2, SHORT, options.bf16)) as team:
            team.step(2)
            before = team.ask("traffic")[0]
            team.step()
            after = team.ask("traffic")[0]
        moved = {name: value - before["bytes"].get(name, 0) for name, value in after["bytes"].items()}
        calls = {name: value - before["calls"].get(name, 0) for name, value in after["calls"].items()}
        whole = after["padded_numel"]["all"] * (2 if options.bf16 else 4)
        # Of a buffer's whole bytes, padding included.
        theory = {
            0: {"all_reduce": whole},
            1: {"reduce_scatter": whole, "all_gather": whole},
            2: {"reduce_scatter": whole, "all_gather": whole},
            3: {"reduce_scatter": whole, "all_gather": 2 * whole},
        }[stage]
        for name in sorted(moved):
            if moved[name]:
                table.add(f"stage {stage}, {name}", moved[name] / _MIB, f"{calls[name]} calls")
        for name, expected in theory.items():
            # At stage 3, units that are still in their slots when the backward begins are not gathered again. Beside
            # gradients and parameters there are a few numbers: of norms, and of what ranks must agree on.
            fewer = stage == 3 and name == "all_gather"
            table.demand(
                f"stage {stage}, {name}: {'<=' if fewer else '=='} {expected / _MIB:.1f} MiB; bytes beyond it",
                moved.get(name, 0) - expected,
                least=None if fewer else 0,
                most=_AGREEMENT_BYTES,
            )
    return [table]


def memory(options: Options) -> list[Figures]:
    """Reads the most memory that was resident in a rank, in building and in three steps."""
    table = Figures(f"Most memory resident in a rank, 2 ranks, 202M parameters, {options.dtype}", "MiB")
    mapped = Figures("The same with every page a rank has mapped, its peers' too, as `ps` has it", "MiB")
    for stage in options.stages:
        peers = [peer for peer in options.peers if stage or peer == "deepspeed"]
        rows: dict[str, str] = {}
        for contender in (*options.ours, *peers):
            rows[contender] = row = f"stage {stage}, {contender}"
            with options.team(Job(contender, stage, 2, LARGE, options.bf16, sampled=True)) as team:
                built = team.ask("memory")
                team.ask("reset")
                team.step(3)
                ran = team.ask("memory")
            # What is shared counts once for the host: each page by equal parts with the ranks that have it mapped.
            parts = [[seen["peak"] - seen["counted_twice"] for seen in phase] for phase in (built, ran)]
            phase, rank = max(((p, r) for p in range(2) for r in range(2)), key=lambda at: parts[at[0]][at[1]])
            most = (built, ran)[phase][rank]
            table.add(
                row,
                parts[phase][rank] / _MIB,
                f"in building {max(parts[0]) / _MIB:.0f}, in steps {max(parts[1]) / _MIB:.0f}; at the most: "
                f"own {most['own'] / _MIB:.0f}, shared {(most['shared'] - most['counted_twice']) / _MIB:.0f}, "
                f"libraries {most['files'] / _MIB:.0f}; after import {most['imported'] / _MIB:.0f}",
            )
            mapped.add(row, max(seen["peak"] for seen in (*built, *ran)) / _MIB)
        table.add(f"stage {stage}, dsrun plan", _planned_bytes(stage, bf16=options.bf16) / _MIB)
        for peer in peers:
            table.demand_ratio(rows["dsrun"], rows[peer], most=1.0)
            mapped.demand_ratio(rows["dsrun"], rows[peer], most=1.0)
        table.demand_ratio(rows["dsrun"], f"stage {stage}, dsrun plan", least=0.95, most=1.05)
    return [table, mapped]


def _planned_bytes(stage: int, *, bf16: bool) -> int:
    """Returns what `dsrun plan` foretells for a rank of the memory section."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "ds.json"
        config.write_text(json.dumps(config_of(Job("dsrun", stage, 2, LARGE, bf16))))
        words = ["plan", "zero_peers.gpt:large", "--config", str(config), "--seq", str(LARGE.seq), "-n", "2", "--json"]
        said = subprocess.run(
            [sys.executable, "-m", "dsrun", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (_BENCH, _BENCH.parent.parent / "src")))},
            check=True,
            capture_output=True,
            timeout=120,
        )
    tiers: list[dict[str, Any]] = json.loads(said.stdout)["tiers"]
    return next(tier["bytes"] for tier in tiers if tier["name"] == "CPU")


def start(options: Options) -> list[Figures]:
    """Times how long the model takes to be handed over, the slower rank's."""
    table = Figures(f"Handing 202M parameters over, 2 ranks, {options.dtype}, after import", "s")
    for _ in range(max(1, options.runs // 3)):
        for stage in options.stages:
            for contender in (*options.ours, *(peer for peer in options.peers if stage in (1, 3))):
                with options.team(Job(contender, stage, 2, LARGE, options.bf16)) as team:
                    table.add(f"stage {stage}, {contender}", max(team.build_s))
    for stage in options.stages:
        table.demand(f"stage {stage}: <= 2", table.median(f"stage {stage}, dsrun"), most=2.0)
    return [table]


def alone(options: Options) -> list[Figures]:
    """Times steps of one rank beside plain torch."""
    tables: list[Figures] = []
    for bf16 in (False, True):
        table = Figures(f"A step of one rank, {'bf16' if bf16 else 'fp32'}", "s")
        with ExitStack() as stack:
            teams = [("plain torch", stack.enter_context(options.team(Job("plain", 0, 1, MEDIUM, bf16))))]
            for stage in options.stages:
                teams.append(
                    (f"stage {stage}", stack.enter_context(options.team(Job("dsrun", stage, 1, MEDIUM, bf16))))
                )
            taken = take_turns(teams, options.runs)
        for row, found in taken.items():
            for step in found:
                table.add(row, step["step_s"])
                table.add(f"{row}{_CPU}", step["cpu_s"])
        for kind in ("", _CPU):
            for stage in options.stages:
                table.demand_ratio(f"stage {stage}{kind}", f"plain torch{kind}", most=1.03)
        tables.append(table)
    return tables


def overhead(options: Options) -> list[Figures]:
    """Times forward and backward of many small blocks; zero_overhead.py has ours in one process, in more detail."""
    table = Figures("Processor time a block, forward and backward less plain torch's; 24 blocks, hidden 16", "us")
    with ExitStack() as stack:
        teams = [("plain", stack.enter_context(options.team(Job("plain", 0, 1, STACK, False))))]
        for contender in (*options.ours, *options.peers):
            for stage in options.stages if contender in options.ours else (2, 3):
                job = Job(contender, stage, 1, STACK, False)
                teams.append((f"{contender}, stage {stage}", stack.enter_context(options.team(job))))
        for _, team in teams:
            team.step(3)
        taken = take_turns(teams, options.runs, steps=8)
    plain = taken.pop("plain")
    for row, found in taken.items():
        for mine, theirs in zip(found, plain, strict=True):
            for key, kind in (("backward_cpu_s", ""), ("backward_s", ", wall")):
                table.add(f"{row}{kind}", (mine[key] - theirs[key]) / STACK.layers * 1e6)
    for stage in options.stages:
        table.demand(f"dsrun, stage {stage} <= 100", table.median(f"dsrun, stage {stage}"), most=100.0)
    return [table]


SECTIONS: dict[str, Callable[[Options], list[Figures]]] = {
    "steps": steps,
    "short": short,
    "bytes": traffic,
    "memory": memory,
    "start": start,
    "alone": alone,
    "overhead": overhead,
}


def main() -> None:
    """Runs the sections that are asked for, and prints each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", default=os.environ.get("DSRUN_PEER_PYTHON"), help="has DeepSpeed; also $DSRUN_PEER_PYTHON"
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of dsrun, as a contender")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--stages", type=int, nargs="+", help="default: 0 to 3")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--fp32", action="store_true", help="train in fp32, where bf16 is the default")
    parser.add_argument("--quick", action="store_true", help="2 rounds, stages 1 and 3, without DeepSpeed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    stages = args.stages or ((1, 3) if args.quick else (0, 1, 2, 3))
    before: Path | None = args.before
    if before is not None and not (before / "src" / "dsrun").is_dir():
        parser.error(f"--before {before}: no checkout of dsrun, for it has no src/dsrun")
    peer_python = None if args.quick else args.peer_python
    options = Options(
        peer_python, 2 if args.quick else args.runs, tuple(stages), before and before.resolve(), not args.fp32
    )
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"python {platform.python_version()}, torch {torch.__version__}, {machine}\n")
    if options.peer_python is not None:
        # What it compiles it keeps, and no figure shall hold a compiler.
        with options.team(Job("deepspeed", 1, 2, SHORT, True)):
            pass
    measure(SECTIONS, args.only, options, runs=options.runs, json_file=args.json)


if __name__ == "__main__":
    main()
