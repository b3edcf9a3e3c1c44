"""Contenders that take turns, and the command line of a benchmark that lets them. Knows no contender's code.

[Note: turns] Each contender's ranks live through a section and take turns of a few steps: figures of a round are
neighbours in time, and ratios are medians of ratios within a round. The first step of a turn does not count, for in
training a step follows another. A step is the slowest rank's.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from sections import measure
from zero_peers.figures import Figures

from .job import Job
from .team import Team

_STEPS_OF_A_TURN = 3


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        deepspeed_python: an interpreter that has DeepSpeed; None: without it.
        runs: rounds that count.
        contenders: names of the contenders beside the floor.
        quick: whether the smallest jobs are measured, to see that all of them run.
    """

    deepspeed_python: str | None
    runs: int
    contenders: tuple[str, ...]
    quick: bool = False

    def team(self, job: Job) -> Team:
        """Returns the ranks of a job."""
        if job.contender != "deepspeed":
            return Team(job)
        assert self.deepspeed_python is not None, "it is no contender then"
        return Team(job, python=self.deepspeed_python)

    def take_turns(
        self, jobs: Sequence[tuple[str, Job]], *, tolerance: float, steps: int = _STEPS_OF_A_TURN
    ) -> dict[str, list[dict[str, float]]]:
        """Returns the steps of each row's job in the rounds that count, see [Note: turns].

        Args:
            jobs: job by row.
            tolerance: difference of two contenders' losses that is allowed, by the larger loss.
            steps: steps of a turn that count.

        Raises:
            RuntimeError: contenders do not compute the same losses.
        """
        with ExitStack() as stack:
            teams = [(row, stack.enter_context(self.team(job))) for row, job in jobs]
            taken: dict[str, list[dict[str, float]]] = {row: [] for row, _ in teams}
            for round_ in range(-1, self.runs):
                # Whoever comes first finds another machine than who comes after it: so nobody always does.
                turn = round_ % len(teams)
                for row, team in [*teams[turn:], *teams[:turn]]:
                    found = team.step(1 + steps)[1:]
                    if round_ >= 0:
                        taken[row] += found
        for losses in zip(*([step["loss"] for step in found] for found in taken.values()), strict=True):
            if max(losses) - min(losses) > tolerance * max(losses):
                raise RuntimeError(
                    f"contenders do not train the same model: losses {dict(zip(taken, losses, strict=True))}"
                )
        return taken


def run(
    sections: Mapping[str, Callable[[Options], list[Figures]]], *, about: str | None, runs: int, has_quick: bool = False
) -> None:
    """Runs the sections that the command line asks for, and prints each when it is done.

    Args:
        sections: functions by the name of the section.
        about: description of the benchmark, for `--help`.
        runs: rounds that count where the command line says nothing of them.
        has_quick: whether there are smallest jobs.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--deepspeed-python", default=os.environ.get("DSRUN_PEER_PYTHON"), help="has DeepSpeed; also $DSRUN_PEER_PYTHON"
    )
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), metavar="SECTION")
    parser.add_argument("--contenders", nargs="+", choices=("dsrun", "torch", "deepspeed"), help="default: all")
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--json", type=Path, metavar="FILE")
    if has_quick:
        parser.add_argument("--quick", action="store_true", help="the smallest jobs, one round")
    args = parser.parse_args()
    asked: list[str] | None = args.contenders
    if asked and "deepspeed" in asked and args.deepspeed_python is None:
        parser.error("deepspeed: no interpreter that has it; give --deepspeed-python")
    found = asked or ["dsrun", "torch", *([] if args.deepspeed_python is None else ["deepspeed"])]
    quick = has_quick and args.quick
    options = Options(args.deepspeed_python, 1 if quick else args.runs, tuple(found), quick)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"python {platform.python_version()}, torch {torch.__version__}, {machine}\n")
    measure(sections, args.only, options, runs=options.runs, json_file=args.json)
