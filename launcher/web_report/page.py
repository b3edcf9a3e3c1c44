"""The page of a report: what is known of a job, or of several, put into one file of HTML.

[Note: what a page may hold] Names, commands and lines of logs come from anywhere. The template escapes every value by
itself, and each passes the masker on its way into the page. A policy in its head forbids the page to load anything and
to run any script but its own, which is named by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dsrun import __version__
from dsrun.units import format_bytes, format_count, format_duration, format_list

from ..jobs.description import Row, end_rows, hardware_rows, job_rows, plan_rows, software_rows
from ..jobs.facts import memory_sizes
from ..jobs.listing import Job
from ..jobs.text import command_text, short_duration, state_text, took_s
from ..masking import Masker
from .differences import config_rows, fact_rows
from .findings import Finding, findings_of
from .job_plots import (
    loss_plots,
    memory_plots,
    optimizer_plots,
    overlay_plots,
    phase_plots,
    phase_rows,
    present,
    script_plots,
    speed_plots,
    traffic_plot,
    waits_plot,
)
from .job_source import JobSource
from .plots import COLOURS, Plot, printable
from .run_figures import RunFigures, figures_of
from .timeline import Happening, happenings, timeline_plot

_MOST_HOSTS = 4
_TIERS = (("gpu", "device"), ("cpu", "host"), ("disk", "disk"))


@dataclass(frozen=True, slots=True)
class Card:
    """One figure at a glance: its label, its value, and a few words to it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the page about a job: plots, and a table below them."""

    name: str
    heading: str
    plots: Sequence[Plot] = ()
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPart:
    """What the page says of its job; the template's `page.job`."""

    state: str
    is_bad: bool
    summary: str
    command: str
    verdict: Sequence[str]
    notes: Sequence[str]
    cards: Sequence[Card]
    findings: Sequence[Finding]
    loss: tuple[Plot, Plot] | None
    timeline: Plot | None
    happenings: Sequence[Happening]
    sections: Sequence[Section]
    log_rank: int | None
    log_lines: Sequence[str]
    config: bool
    config_note: str
    config_set: Sequence[Row]
    config_defaults: Sequence[Row]
    facts: Sequence[tuple[str, str, Sequence[Row]]]


@dataclass(frozen=True, slots=True)
class ComparedJob:
    """A row of the table of jobs: its colour, its name and its cells."""

    style: str
    name: str
    cells: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralPart:
    """What the page says of several jobs; the template's `page.several`."""

    jobs: Sequence[ComparedJob]
    notes: Sequence[str]
    headings: Sequence[str]
    figures: Sequence[Sequence[str]]
    plots: Sequence[Plot]
    config: Sequence[Sequence[str]]
    no_config: str
    facts: Sequence[Sequence[str]]
    findings: Sequence[tuple[str, Sequence[Finding]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page: `job` is set for one, `several` for more."""

    title: str
    foot: str
    job: JobPart | None = None
    several: SeveralPart | None = None


def page_of(sources: Sequence[JobSource], *, now: datetime, masker: Masker) -> str:
    """Returns a page about one job, or one that compares several.

    Args:
        sources: Facts of each job, one at least.
        now: Present time.
        masker: Hides secrets that are known by value.
    """
    about = f"dsrun {__version__}, {now:%Y-%m-%d %H:%M %z}"
    if len(sources) == 1:
        source = sources[0]
        title = f"Job {source.job.id}"
        page = Page(title=title, foot=f"{about}, from {source.job.folder}", job=_job_part(source, now))
    else:
        title = f"{len(sources)} jobs: {format_list([source.job.id for source in sources], 4)}"
        page = Page(title=title, foot=about, several=_several_part(sources, now))
    return _render(page, masker)


def _render(page: Page, masker: Masker) -> str:
    def mask(value: Any) -> Any:
        if isinstance(value, Markup):
            return Markup(masker.text(value))
        return masker.text(printable(value)) if isinstance(value, str) else value

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=mask,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    script = environment.get_template("page.js").render()
    environment.filters["markup"] = Markup
    environment.filters["code"] = _with_code
    environment.filters["duration"] = short_duration
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(page=page, script_digest=digest)


def _with_code(text: str) -> Markup:
    """Returns a text of this package as HTML, in which what stands between back-ticks is code."""
    parts = [
        Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)


def _job_part(source: JobSource, now: datetime) -> JobPart:
    job, run = source.job, source.run
    figures = figures_of(run)
    probe: dict[str, Any] = source.facts.get("probe") or {}
    sizes = memory_sizes(probe)
    created = job.record.created
    verdict: Sequence[str] = (job.outcome or {}).get("failure") or ()
    until_s = (job.ended or now).timestamp() - created.timestamp() if job.ended or job.state.is_live else None
    sections = [
        Section(name="throughput", heading="Throughput", plots=speed_plots(run, figures)),
        Section(
            name="step-time",
            heading="Step time",
            plots=phase_plots(run, figures) if len(run.steps) else (),
            headings=("phase", "share on rank 0", "least of the ranks", "median", "most", "rank that has most"),
            rows=phase_rows(run, figures),
            is_wide=True,
        ),
        Section(name="waits", heading="Waits", plots=present([waits_plot(run)]), is_wide=True),
        Section(
            name="memory",
            heading="Memory",
            plots=memory_plots(run, figures, sizes),
        ),
        Section(name="traffic", heading="Traffic", plots=present([traffic_plot(run)]), is_wide=True),
        Section(name="optimizer", heading="Optimizer", plots=optimizer_plots(run, figures)),
        Section(
            name="figures",
            heading="Figures of the script",
            plots=list(script_plots(run)),
            note=_figures_note(source),
        ),
    ]
    return JobPart(
        state=state_text(job),
        is_bad=job.state.value in ("failed", "crashed", "unknown"),
        summary=_summary(job, now, figures),
        command=command_text(job),
        verdict=verdict,
        notes=_notes(source),
        cards=_cards(figures),
        findings=_findings(source, figures) if figures.steps else (),
        loss=loss_plots(run, figures),
        timeline=timeline_plot(
            source.events,
            run.checkpoints,
            created,
            kept_times=[gap.kept_time for gap in run.gaps],
            until_s=until_s,
        ),
        happenings=happenings(source.events, created),
        sections=[section for section in sections if section.plots or section.rows],
        log_rank=source.log_rank,
        # A verdict that quotes them has the same lines.
        log_lines=() if any(line.startswith("last lines of rank") for line in verdict) else source.log_lines,
        config=bool(source.config or source.config_note),
        config_note=source.config_note,
        config_set=[(each.path, each.text) for each in source.config if not each.is_default],
        config_defaults=[(each.path, each.text) for each in source.config if each.is_default],
        facts=[
            ("job", "Job", list(job_rows(job))),
            ("plan", "Plan", list(plan_rows(job))),
            ("hardware", "Hardware", list(hardware_rows(probe))),
            ("software", "Software", list(software_rows(probe, source.facts))),
            ("end", "End", list(end_rows(job))),
        ],
    )


def _findings(source: JobSource, figures: RunFigures) -> list[Finding]:
    sizes = memory_sizes(source.facts.get("probe") or {})
    return findings_of(figures, source.run.last_waits, device_bytes=sizes.get("gpu", math.nan))


def _summary(job: Job, now: datetime, figures: RunFigures) -> str:
    record = job.record
    hosts = format_list(record.hosts, _MOST_HOSTS)
    parts = [f"{record.ranks} rank{'s' * (record.ranks != 1)} on {hosts}"]
    parts.append(f"made {record.created:%Y-%m-%d %H:%M}")
    took = took_s(job, now)
    if took is not None:
        parts.append(f"{'runs for' if job.state.is_live else 'ran for'} {format_duration(took)}")
    if figures.steps:
        parts.append(f"step {_step_text(figures)}")
    if job.exit_code is not None:
        parts.append(f"exit code {job.exit_code}")
    return ", ".join(parts)


def _step_text(figures: RunFigures) -> str:
    total = figures.total_steps
    return f"{figures.last_step}{f' of {total:.0f}' if math.isfinite(total) else ''}"


def _notes(source: JobSource) -> list[str]:
    notes: list[str] = []
    if not len(source.run.steps):
        notes.append(
            "No step of a training was recorded: records come from `dsrun.initialize`, from the first step on."
        )
    if source.run.engines > 1:
        notes.append(f"{source.run.engines} engines train in rank 0; this page shows the first one.")
    if source.run.unread:
        notes.append(f"{source.run.unread} records are of another version or damaged, and were passed over.")
    return notes


def _figures_note(source: JobSource) -> str:
    shown, known = len(list(script_plots(source.run))), len(source.run.figures) + source.run.dropped_figures
    return f"{shown} of {known} figures are shown." if shown < known else ""


def _cards(figures: RunFigures) -> list[Card]:
    if not figures.steps:
        return []
    cards = [Card("step", _step_text(figures))]
    if math.isfinite(figures.last_loss):
        value = f"{figures.last_loss:.4g}"
        if figures.is_loss_lost:
            cards.append(Card("loss", "not finite", f"last step; {value} before, smoothed"))
        else:
            cards.append(Card("loss", value, "smoothed, last step"))
    cards.append(Card("step time", format_duration(figures.step_s), "median"))
    if math.isfinite(figures.tokens_per_s):
        cards.append(Card("tokens a second", format_count(figures.tokens_per_s), "median, all ranks"))
    elif math.isfinite(figures.samples_per_s):
        cards.append(Card("samples a second", format_count(figures.samples_per_s), "median, all ranks"))
    if math.isfinite(figures.mfu):
        cards.append(Card("MFU", f"{100 * figures.mfu:.1f}%", "share of the devices' peak"))
    elif math.isfinite(figures.model_tflops):
        cards.append(Card("model TFLOP/s", f"{figures.model_tflops:.3g}", "median, all ranks"))
    for tier, name in _TIERS:
        if tier in figures.peak_bytes:
            cards.append(Card(f"{name} memory", format_bytes(figures.peak_bytes[tier]), "peak of a rank"))
    if figures.lost_s:
        cards.append(Card("lost to failures", format_duration(figures.lost_s), "restarts and steps taken again"))
    if figures.skipped:
        cards.append(Card("skipped updates", str(figures.skipped)))
    return cards


def _several_part(sources: Sequence[JobSource], now: datetime) -> SeveralPart:
    names = _short_names([source.job.id for source in sources])
    figures = [figures_of(source.run) for source in sources]
    jobs: list[ComparedJob] = []
    for number, (name, source) in enumerate(zip(names, sources, strict=True)):
        job = source.job
        took = took_s(job, now)
        cells = (
            state_text(job),
            str(job.record.ranks),
            f"{job.record.created:%Y-%m-%d %H:%M}",
            "–" if took is None else format_duration(took),
        )
        dash = f" dash{number // COLOURS % 3}" if number >= COLOURS else ""
        jobs.append(ComparedJob(f"swatch s{number % COLOURS}{dash}", name, cells))
    notes = [f"{name}: {note}" for name, source in zip(names, sources, strict=True) for note in _notes(source)]
    cards = [{card.label: card.value for card in _cards(each)} for each in figures]
    labels = list(dict.fromkeys(label for each in cards for label in each))
    return SeveralPart(
        jobs=jobs,
        notes=notes,
        headings=["", *names],
        figures=[[label, *(each.get(label, "–") for each in cards)] for label in labels],
        plots=overlay_plots([(name, source.run) for name, source in zip(names, sources, strict=True)]),
        config=config_rows(sources),
        no_config="The configs are alike."
        if all(source.config for source in sources)
        else "Not all of these jobs have a config that can be read.",
        facts=fact_rows(sources),
        findings=[
            (name, _findings(source, each))
            for name, source, each in zip(names, sources, figures, strict=True)
            if each.steps
        ],
    )


def _short_names(ids: Sequence[str]) -> list[str]:
    """Returns the ids without what all of them begin with, where that is a date; whole if two would be alike."""
    short = [job_id.rpartition("-")[2] if job_id[:8].isdecimal() else job_id for job_id in ids]
    return short if len(set(short)) == len(short) else list(ids)
