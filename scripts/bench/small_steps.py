"""Steps of small models on one rank beside plain torch: what a step costs where the host is most of it.

    python scripts/bench/small_steps.py [--hidden 64 128 256] [--dtypes fp32 bf16] [--stages 0 1 2 3]
        [--source FOLDER ...] [--rounds 15] [--repeats 12] [--json FILE]

The model is the GPT of zero.py with 2 layers, 512 tokens in its vocabulary and 4 samples of 64 tokens. A step is
everything: forward, backward, clipping by the global norm, fused AdamW, and new gradients; in bf16 both sides have
fp32 masters. Plain torch and the engines of all stages live in one process with one thread, and take turns step by
step, `repeats` times a round. The figure of a round is the least step, and a ratio is of two figures of one round; the
table has the median over rounds and the quartiles. With several `--source` folders (check-outs of dsrun) each has a
process of its own, and these take turns by rounds: so before and after meet the same machine.

Caveats: one thread, a CPU. Steps of the wall clock; where others use the machine, both sides of a ratio meet them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_BENCH = Path(__file__).resolve().parent
_PLAIN = "plain"


class Contenders:
    """Plain torch and the engines of all stages, in this process."""

    def __init__(self, hidden: int, *, bf16: bool, stages: Sequence[int]) -> None:
        import torch
        from zero_peers import with_dsrun, with_plain
        from zero_peers.gpt import GPT, batch_of
        from zero_peers.job import Job, Shape

        torch.set_num_threads(1)
        shape = Shape(layers=2, hidden=hidden, heads=4, vocab=512, seq=64, micro=4)
        batch = batch_of(shape, rank=0, step=0)
        self._steps: dict[str, Callable[[], None]] = {}

        def made(name: str, module: Any, job: Job) -> None:
            torch.manual_seed(1)
            trainer = module.build(GPT(shape), job, 0)

            def step() -> None:
                trainer.forward_backward(batch)
                trainer.update()

            self._steps[name] = step

        with contextlib.redirect_stdout(sys.stderr):
            made(_PLAIN, with_plain, Job("plain", 0, 1, shape, bf16))
            for stage in stages:
                made(f"stage {stage}", with_dsrun, Job("dsrun", stage, 1, shape, bf16))
        for step in self._steps.values():
            for _ in range(5):
                step()

    def round(self, repeats: int, turn: int) -> dict[str, float]:
        """Returns the seconds of the least step by contender.

        Args:
            repeats: steps of each.
            turn: number of the turn, which decides the contender that begins.
        """
        names = list(self._steps)
        order = names[turn % len(names) :] + names[: turn % len(names)]
        found = dict.fromkeys(names, float("inf"))
        for _ in range(repeats):
            for name in order:
                began = time.perf_counter()
                self._steps[name]()
                found[name] = min(found[name], time.perf_counter() - began)
        return found


def _child(options: argparse.Namespace) -> None:
    """Takes a round for each line of stdin, `HIDDEN DTYPE REPEATS TURN`, and answers on stdout as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made: dict[tuple[int, str], Contenders] = {}
    for line in sys.stdin:
        hidden, dtype, repeats, turn = line.split()
        key = (int(hidden), dtype)
        if key not in made:
            made.clear()
            made[key] = Contenders(key[0], bf16=dtype == "bf16", stages=options.stages)
        print(json.dumps(made[key].round(int(repeats), int(turn))), file=answers, flush=True)


def _start(source: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(source / "src"), str(_BENCH)])
    stages = [str(stage) for stage in options.stages]
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--child", "--stages", *stages],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(process: subprocess.Popen[str], words: str) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{words}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _with_quartiles(values: Sequence[float], digits: int = 2) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    """Starts a process for each source, and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--source", type=Path, nargs="+", default=[_BENCH.parent.parent], help="check-outs of dsrun")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options)
        return
    rows: list[dict[str, Any]] = []
    processes = {str(source): _start(source, options) for source in options.source}
    names = [f"stage {stage}" for stage in options.stages]
    print("| model | source | plain, ms | " + " | ".join(f"{name} : plain" for name in names) + " |")
    print("|---|" + "---|" * (len(names) + 2))
    try:
        for dtype in options.dtypes:
            for hidden in options.hidden:
                rounds: dict[str, list[dict[str, float]]] = {source: [] for source in processes}
                for turn in range(options.rounds):
                    for source, process in processes.items():
                        rounds[source].append(_ask(process, f"{hidden} {dtype} {options.repeats} {turn}"))
                for source, found in rounds.items():
                    plain = _with_quartiles([one[_PLAIN] * 1e3 for one in found])
                    ratios = [_with_quartiles([one[name] / one[_PLAIN] for one in found]) for name in names]
                    print(f"| hidden {hidden}, {dtype} | {source} | {plain} | {' | '.join(ratios)} |", flush=True)
                    rows.append({"hidden": hidden, "dtype": dtype, "source": source, "rounds": found})
    finally:
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
