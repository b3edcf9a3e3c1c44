"""`dsrun trace`: the profiles of a job's ranks, merged into one file and summed up. Only shows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import DsrunError, InputError

from ..console.rank_set import format_rank_set, parse_rank_set
from ..jobs.listing import find_job
from ..jobs.text import align
from ..options.job_argument import job_argument
from ..os_errors import refusal_of
from ..traces.figures import RankFigures, figures_of
from ..traces.merge import MergedTrace, read_job_times
from ..traces.rank_trace import read_rank_trace, traced_ranks

#: Letters of an operation's name in the table.
_MOST_NAME = 60
#: Letters of a set of ranks in the name of a file.
_MOST_RANKS_NAME = 60


@click.command("trace")
@click.option("--ranks", metavar="RANKS", help="Take these ranks only, like `0,8-11`.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write it there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@job_argument()
def command(ranks: str | None, output: Path | None, as_json: bool, job: str) -> int:
    """Merge the profiles of a job's ranks, and show what their steps took.

    Profiles come of `dsrun run --profile steps=10:13`. chrome://tracing and ui.perfetto.dev show the merged file: a row
    a rank, and one with the launcher's events.
    """
    found = find_job(job, os.environ)
    there = traced_ranks(found.folder)
    if not there:
        raise InputError(
            f"job {found.id} has left no profile",
            hint="`dsrun run --profile steps=10:13 train.py` profiles steps 10 to 13 of rank 0",
        )
    taken = there if ranks is None else sorted(parse_rank_set(ranks, max(found.record.ranks, there[-1] + 1)))
    missing = [rank for rank in taken if rank not in there]
    if missing:
        raise InputError(f"job {found.id} has no profile of rank {missing[0]}; there are {format_rank_set(there)}")
    path = _own_path(JobPaths(found.folder).merged_trace, taken, there) if output is None else output
    try:
        figures, damaged = _merge(found.folder, taken, path)
    except OSError as error:
        raise InputError(f"the profiles of job {found.id} are not merged: {refusal_of(error)}") from error
    for line in damaged:
        click.echo(f"dsrun: {line}", err=True)
    if as_json:
        body = {"schema_version": 1, "job_id": found.id, "trace": str(path), "damaged": damaged}
        click.echo(json.dumps({**body, "ranks": [asdict(each) for each in figures]}, indent=2))
    else:
        click.echo("\n".join([str(path), "", *figure_lines(figures)]))
    return 0 if not damaged else DsrunError.exit_code


def _own_path(merged: Path, ranks: Sequence[int], profiled: Sequence[int]) -> Path:
    """Returns the file in the job's folder: some of the ranks have one of their own, beside that of all.

    Raises:
        InputError: the ranks are too many to be named.
    """
    if list(ranks) == list(profiled):
        return merged
    named = format_rank_set(ranks)
    if len(named) > _MOST_RANKS_NAME:
        raise InputError(f"`--ranks` takes {len(ranks)} ranks, too many for the name of a file", hint="add `-o FILE`")
    stem, _, ending = merged.name.partition(".")
    return merged.with_name(f"{stem}-{named}.{ending}")


def _merge(folder: Path, ranks: Sequence[int], path: Path) -> tuple[list[RankFigures], list[str]]:
    """Writes the merged file; returns the figures of the ranks, and what is wrong with those that are damaged.

    Raises:
        InputError: all are damaged.
        OSError: a file cannot be read or written.
    """
    figures: list[RankFigures] = []
    damaged: list[str] = []
    with MergedTrace(path, read_job_times(folder)) as merged:
        for rank in ranks:
            try:
                trace = read_rank_trace(folder, rank)
            except InputError as error:
                damaged.append(str(error))
                continue
            merged.add(trace)
            figures.append(figures_of(trace))
        if not figures:
            raise InputError(damaged[0])
    return figures, damaged


def figure_lines(figures: Sequence[RankFigures]) -> list[str]:
    """Returns a table of the steps of each rank, and one of the operations that take most.

    Args:
        figures: Figures of the ranks.
    """
    has_gpu = any(step.kernels_s for each in figures for step in each.steps)
    rows: list[tuple[str, ...]] = [
        ("rank", "step", "seconds", "CPU operations", *(["GPU busy"] if has_gpu else []), "waits")
    ]
    for each in figures:
        for step in each.steps:
            gpu = [f"{step.kernels_s:.4f}"] if has_gpu else []
            told = (f"{step.seconds:.4f}", f"{step.cpu_ops_s:.4f}", *gpu, f"{step.waits_s:.4f}")
            rows.append((str(each.rank), str(step.step), *told))
    lines = [*align(rows), ""]
    for each in figures:
        total_s = sum(step.seconds for step in each.steps) or 1.0
        rows = [(f"rank {each.rank}", "on", "calls", "own seconds", "share")]
        for top in each.operations:
            told = (top.place, str(top.calls), f"{top.seconds:.4f}", f"{top.seconds / total_s:.1%}")
            rows.append((top.name[:_MOST_NAME], *told))
        lines += [*align(rows), ""]
    return lines[:-1]
