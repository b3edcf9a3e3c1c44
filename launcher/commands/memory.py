"""`dsrun memory`: what a job's memory was used for, from what its rank 0 recorded. Only shows."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dsrun.errors import InputError
from dsrun.memory_use.findings import fragmentation_of, peak_of, start_of
from dsrun.memory_use.samples import latest_step, parts_of, to_record
from dsrun.memory_use.stacks import stacks_lines, stacks_record
from dsrun.memory_use.text import report_lines, tiers_of

from ..jobs.listing import find_job
from ..options.job_argument import job_argument
from ..records.memory import MemoryRecords, read_memory_records


@click.command("memory")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw a .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every sample.")
@job_argument()
def command(as_json: bool, plot: Path | None, job: str) -> int:
    """Show a job's memory: bytes by kind over a step, peaks and their owners, fragmentation, growth.

    Rank 0 samples steps 1, 2, 3, 10, 100 and so on, and watches growth over 50 steps. Pictures are drawn by matplotlib.
    """
    found = find_job(job, os.environ)
    records = read_memory_records(found.folder)
    if records is None or not (records.samples or records.summary):
        raise InputError(
            f"job {found.id} has recorded no memory",
            hint="records come from `dsrun.initialize`, from the first training step on",
        )
    if plot is not None:
        from dsrun.memory_use.plot import save_plot

        save_plot(records.samples, plot)
        click.echo(f"dsrun: {plot} was drawn", err=True)
    if as_json:
        click.echo(json.dumps(_as_json(found.id, records), indent=2))
    else:
        lines = report_lines(records.samples, records.growths, state=records.state)
        if records.stacks is not None:
            lines += ["", *stacks_lines(records.stacks)]
        click.echo("\n".join(lines))
    return 0


def _as_json(job_id: str, records: MemoryRecords) -> dict[str, Any]:
    newest = {growth.tier: growth for growth in records.growths}
    tiers: dict[str, Any] = {}
    for tier in tiers_of(records.samples):
        peak, figure = peak_of(records.samples, tier), fragmentation_of(records.samples, tier)
        step = [(sample, use) for sample in latest_step(records.samples) if (use := sample.of(tier)) is not None]
        start = start_of(records.samples, step[0][0], tier) if step else None
        tiers[tier] = {
            "over_step": [
                {"step": sample.step, "phase": sample.phase, "bytes": dict(parts_of(use, start))}
                for sample, use in step
            ],
            "peak": None if peak is None else {**asdict(peak), "owner": peak.owner, "parts": dict(peak.parts)},
            "fragmentation": None
            if figure is None
            else {**asdict(figure), "share": round(figure.share, 4), "advice": figure.advice},
            "growth": asdict(newest[tier]) if tier in newest else None,
        }
    return {
        "schema_version": 1,
        "job_id": job_id,
        "summary": records.summary,
        "stacks": None if records.stacks is None else stacks_record(records.stacks),
        "tiers": tiers,
        "samples": [to_record(sample) for sample in records.samples],
    }
