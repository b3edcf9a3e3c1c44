"""Whether the plan orders layouts of ranks as their measured steps do: 8 layouts of 4 CPU ranks, one model and batch.

    python scripts/bench/layouts.py [--runs 5] [--json F] [--write]     --write: into docs/benchmarks.md

Each layout trains the same Llama in fp32 on the same samples, in processes of its own with a thread each; all live
through the run and take turns of a few steps, of which the first does not count. A step is the slowest rank's, and
losses must agree. In every round each product, update and message that the layouts have is probed, too, while all ranks
do the same: medians of these are the speeds of the plan's machine. No step's time enters a prediction.

Layouts and sizes were chosen by what the plan predicted from probes, before any of their steps was measured, so that
predictions lie apart. What a plan leaves out makes steps longer than predicted: norms and other elementwise work, which
ranks that share layers all do, and the engine's own time, most of it with many small micro batches. On a machine with
other work the probes of a moment are not those of the steps: the order is a result of an idle machine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from layouts_parts.job import Job, ProbeJob
from layouts_parts.predictions import predicted, probes_of
from layouts_parts.rank_order import Agreement, agreement
from teams.team import Team

from dsrun.estimate.prediction import Prediction

LAYOUTS = (
    Job(pipe=4, schedule="interleaved", chunks=2, micros=4),
    Job(tensor=2, pipe=2, micros=2),
    Job(data=4, stage=1),
    Job(pipe=4, micros=2),
    Job(data=2, tensor=2, stage=1, micros=4),
    Job(data=2, pipe=2, stage=1, micros=8),
    Job(tensor=4, micros=8),
    Job(data=4, stage=3, micros=4),
)
LEAST_TAU = 0.7
_TINY = Job(seq=8, hidden=64, inner=96, vocab=64, layers=2, samples=4)
#: Two ranks have all that four have: sums of gradients and of layers, and messages of stages.
_QUICK = (
    replace(_TINY, data=2, stage=3, micros=2),
    replace(_TINY, tensor=2),
    replace(_TINY, pipe=2, micros=2),
)
_STEPS_OF_A_TURN = 2
#: How far losses of layouts may lie apart, by the larger one: roundings of fp32 in another order, over some updates.
_LOSS_TOLERANCE = 1e-3
_PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_HEADING = "## The order of layouts"
#: Section of the page before which a new one is put.
_NEXT_HEADING = "## On a GPU"


@dataclass(frozen=True, slots=True)
class Found:
    """A layout's prediction and its steps.

    Attributes:
        job: layout.
        prediction: prediction by the probes of all rounds.
        steps_s: seconds of the steps that count.
    """

    job: Job
    prediction: Prediction
    steps_s: list[float]

    @property
    def predicted_s(self) -> float:
        """Seconds that the plan predicts."""
        assert self.prediction.step.seconds is not None, "all speeds are given"
        return self.prediction.step.seconds

    @property
    def median_s(self) -> float:
        """Median of the measured seconds."""
        return statistics.median(self.steps_s)


def measure(layouts: Sequence[Job], runs: int) -> list[Found]:
    """Returns what was found of each layout.

    Args:
        layouts: layouts of as many ranks each, and one model and batch.
        runs: rounds that count; one before them does not.

    Raises:
        RuntimeError: layouts do not compute the same losses.
    """
    probes = list(dict.fromkeys(probe for job in layouts for probe in probes_of(job)))
    probing = ProbeJob(ranks=layouts[0].ranks, probes=[asdict(probe) for probe in probes], model=asdict(layouts[0]))
    steps: list[list[dict[str, float]]] = [[] for _ in layouts]
    times: list[list[float]] = []
    with ExitStack() as stack:
        prober = stack.enter_context(Team(probing))
        teams = [(stack.enter_context(Team(job)), found) for job, found in zip(layouts, steps, strict=True)]
        for round_ in range(-1, runs):
            probed = prober.ask("probe")[0]
            turn = round_ % len(teams)
            for team, found in [*teams[turn:], *teams[:turn]]:
                taken = team.step(1 + _STEPS_OF_A_TURN)[1:]
                if round_ >= 0:
                    found += taken
            if round_ >= 0:
                times.append(probed)
    compare_losses(layouts, steps)
    seconds = {
        probe: statistics.median(of_probe) for probe, of_probe in zip(probes, zip(*times, strict=True), strict=True)
    }
    cores = len(os.sched_getaffinity(0))
    return [
        Found(job, predicted(job, seconds, cores), [step["step_s"] for step in found])
        for job, found in zip(layouts, steps, strict=True)
    ]


def compare_losses(layouts: Sequence[Job], steps: Sequence[Sequence[Mapping[str, float]]]) -> None:
    for row in zip(*steps, strict=True):
        losses = [step["loss"] for step in row]
        if max(losses) - min(losses) > _LOSS_TOLERANCE * max(losses):
            told = dict(zip((job.name for job in layouts), losses, strict=True))
            raise RuntimeError(f"layouts do not train the same model: losses {told}")


def agreement_of(found: Sequence[Found]) -> Agreement:
    """Returns how the predicted order agrees with the measured one."""
    return agreement([each.predicted_s for each in found], [each.median_s for each in found])


def section(found: Sequence[Found], about: str) -> str:
    """Returns the section of the page: the table, the fastest predicted first, and what is demanded of it.

    Args:
        found: layouts with their predictions and steps.
        about: first line, with the command and the machine.
    """
    lines = [
        _HEADING,
        about,
        "Speeds of products, updates and messages were probed for each layout by itself, while all ranks did the same.",
        "",
        "| layout | micro batches x samples | predicted s | of it | measured, median s | least to most | x predicted |",
        f"|{'---|' * 7}",
    ]
    for each in sorted(found, key=lambda each: each.predicted_s):
        lines.append(f"| {' | '.join(_cells(each))} |")
    agreed = agreement_of(found)
    verdict = "met" if agreed.tau >= LEAST_TAU else "**not met**"
    lines += [
        "",
        f"- Kendall tau >= {LEAST_TAU:g}: {agreed.tau:.2f}, {verdict} ({agreed.alike} pairs in the same order, "
        f"{agreed.reversed} reversed, {agreed.tied} tied)",
    ]
    return "\n".join(lines)


def _cells(each: Found) -> tuple[str, ...]:
    parts = ", ".join(f"{path.path} {path.seconds:.2g}" for path in each.prediction.paths if path.seconds)
    return (
        each.job.name,
        f"{each.job.micros} x {each.job.micro_samples}",
        f"{each.predicted_s:.3f}",
        parts,
        f"{each.median_s:.3f}",
        f"{min(each.steps_s):.3f} to {max(each.steps_s):.3f}",
        f"{each.median_s / each.predicted_s:.2f}",
    )


def with_section(page: str, text: str) -> str:
    """Returns the page with the section in place of the old one, or before the last section.

    Args:
        page: text of the page.
        text: text of the section.
    """
    start = page.find(f"{_HEADING}\n")
    if start < 0:
        start = page.index(f"{_NEXT_HEADING}\n")
        return f"{page[:start]}{text}\n\n{page[start:]}"
    following = re.search(r"^## ", page[start + len(_HEADING) :], re.MULTILINE)
    end = len(page) if following is None else start + len(_HEADING) + following.start()
    return f"{page[:start]}{text}\n\n{page[end:]}".rstrip() + "\n"


def _as_json(found: Sequence[Found]) -> dict[str, Any]:
    agreed = agreement_of(found)
    rows = [
        {
            "layout": asdict(each.job),
            "name": each.job.name,
            "predicted_s": each.predicted_s,
            "paths_s": {path.path: path.seconds for path in each.prediction.paths},
            "speeds": asdict(each.prediction.machine.given),
            "steps_s": each.steps_s,
        }
        for each in found
    ]
    return {"tau": agreed.tau, **asdict(agreed), "rows": rows}


def main() -> None:
    """Measures and prints the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="rounds that count")
    parser.add_argument("--quick", action="store_true", help="two ranks, a tiny model, one round: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help=f"write the section into docs/{_PAGE.name}")
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("--write: figures of --quick are no results")
    layouts, runs = (_QUICK, 1) if args.quick else (LAYOUTS, args.runs)
    machine = f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before"
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    about = f"`python scripts/bench/layouts.py --runs {runs}`, {date.today():%-d %B %Y}, {machine}, {versions}."
    found = measure(layouts, runs)
    text = section(found, about)
    print(text)
    if args.json is not None:
        args.json.write_text(json.dumps(_as_json(found), indent=1))
    if args.write:
        _PAGE.write_text(with_section(_PAGE.read_text(), text))


if __name__ == "__main__":
    main()
