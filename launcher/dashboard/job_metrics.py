"""Figures of jobs as metrics with labels, few of each job however many ranks it has. Knows no format and no server.

[Note: few series] Each series costs a metrics server memory for as long as it keeps any. So a job has at most 40, three
more for each host, and one for each figure of the script; what ranks differ in is told as a median and a maximum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsrun.contract.step_records import PHASES, StepSpread

from ..jobs.live_status import LiveRank
from .measures import median_of, memory_use, phase_seconds, rate_median, step_seconds
from .run_view import RunView

#: Axes of which traffic is told.
_MOST_AXES = 3

MetricKind = Literal["gauge", "counter", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of all jobs.

    Attributes:
        name: name without what a format appends: `_total` of a counter, `_info` of an info.
        kind: kind of the metric.
        text: description of the metric.
        rows: labels and value of each series; an info has no value but 1.
    """

    name: str
    kind: MetricKind
    text: str
    rows: list[tuple[Mapping[str, str], float]] = field(default_factory=list[tuple[Mapping[str, str], float]])

    @property
    def full_name(self) -> str:
        """The name that its series have."""
        return self.name + {"gauge": "", "counter": "_total", "info": "_info"}[self.kind]


#: Name -> kind and description, in the order in which they are told.
_METRICS: Mapping[str, tuple[MetricKind, str]] = {
    "dsrun_jobs": ("gauge", "Jobs that run."),
    "dsrun_job": ("info", "What a job is."),
    "dsrun_job_running": ("gauge", "1 while the job runs or waits for its devices, then 0."),
    "dsrun_job_exit_code": ("gauge", "Exit code of a job that has ended."),
    "dsrun_ranks": ("gauge", "Ranks of the job."),
    "dsrun_restarts": ("counter", "Times the job was started again."),
    "dsrun_step": ("gauge", "Newest optimizer step."),
    "dsrun_planned_steps": ("gauge", "Optimizer steps of the whole run."),
    "dsrun_skipped_steps": ("gauge", "Steps whose update was not taken."),
    "dsrun_last_step_timestamp_seconds": ("gauge", "Time of the newest step, seconds since the epoch."),
    "dsrun_loss": ("gauge", "Mean loss of the newest step; NaN where it is not finite."),
    "dsrun_learning_rate": ("gauge", "Learning rate of the first group."),
    "dsrun_grad_norm": ("gauge", "Norm of all gradients before clipping; NaN where it is not finite."),
    "dsrun_loss_scale": ("gauge", "Factor of the losses in fp16."),
    "dsrun_tokens_per_second": ("gauge", "Tokens of all ranks a second, median of the last steps."),
    "dsrun_samples_per_second": ("gauge", "Samples of all ranks a second, median; of models without tokens."),
    "dsrun_model_tflops": ("gauge", "TFLOP/s of the model's forward and backward, all ranks together."),
    "dsrun_hardware_tflops": ("gauge", "TFLOP/s with what is computed again."),
    "dsrun_mfu_ratio": ("gauge", "Share of the devices' peak that dsrun_model_tflops is, from 0 to 1."),
    "dsrun_memory_bytes": ("gauge", "Bytes in use by tier, of the rank that has most."),
    "dsrun_step_seconds": ("gauge", "Median duration of the last steps."),
    "dsrun_phase_seconds": ("gauge", "Seconds of a step by phase, over the ranks."),
    "dsrun_waits_seconds": ("gauge", "Seconds of a step that a rank waits for others, over the ranks."),
    "dsrun_traffic_bytes": ("counter", "Bytes that rank 0 has handed to collectives and messages, by axis."),
    "dsrun_host_ranks": ("gauge", "Ranks that run on a host."),
    "dsrun_host_resident_bytes": ("gauge", "Memory that the ranks of a host have resident."),
    "dsrun_host_idle_seconds": ("gauge", "Longest time since a rank of the host told of progress."),
    "dsrun_log": ("gauge", "Figures that the script gave to engine.log; NaN where one is not finite."),
}


def all_metrics() -> list[str]:
    """Returns the names of all metrics, with what a format appends."""
    return [Metric(name, kind, text).full_name for name, (kind, text) in _METRICS.items()]


def metrics_of(views: Sequence[RunView]) -> list[Metric]:
    """Returns the metrics of jobs; those of which nothing is known are left out.

    Args:
        views: jobs at one moment.
    """
    metrics = {name: Metric(name, kind, text) for name, (kind, text) in _METRICS.items()}
    metrics["dsrun_jobs"].rows.append(({}, sum(view.job.state.is_live for view in views)))
    for view in views:
        for name, labels, value in (*_job_rows(view), *_step_rows(view), *_host_rows(view)):
            metrics[name].rows.append(({"job": view.job.id, **labels}, float(value)))
    return [metric for metric in metrics.values() if metric.rows]


_Row = tuple[str, Mapping[str, str], float]


def _job_rows(view: RunView) -> Iterator[_Row]:
    job = view.job
    script = str((job.record.plan.get("program") or {}).get("target", ""))
    yield "dsrun_job", {"script": script, "user": job.record.user, "host": job.record.host}, 1
    yield "dsrun_job_running", {}, job.state.is_live
    if job.exit_code is not None:
        yield "dsrun_job_exit_code", {}, job.exit_code
    yield "dsrun_ranks", {}, job.record.ranks
    yield "dsrun_restarts", {}, view.restarts


def _step_rows(view: RunView) -> Iterator[_Row]:
    figures, steps = view.figures, list(view.figures.recent)
    last = figures.last
    if last is None:
        return
    yield "dsrun_step", {}, last.step
    yield "dsrun_skipped_steps", {}, figures.skipped
    yield "dsrun_last_step_timestamp_seconds", {}, last.time
    yield "dsrun_learning_rate", {}, last.lr
    known: Iterable[tuple[str, float | None]] = (
        ("dsrun_planned_steps", last.total_steps),
        ("dsrun_loss", _or_nan(last.loss, is_told=bool(figures.loss.points()))),
        ("dsrun_grad_norm", _or_nan(last.grad_norm, is_told=any(each.grad_norm is not None for each in steps))),
        ("dsrun_loss_scale", last.loss_scale),
        ("dsrun_tokens_per_second", None if last.tokens_per_s is None else rate_median(steps)),
        ("dsrun_samples_per_second", rate_median(steps) if last.tokens_per_s is None else None),
        ("dsrun_model_tflops", median_of(steps, "model_tflops")),
        ("dsrun_hardware_tflops", median_of(steps, "hardware_tflops")),
        ("dsrun_mfu_ratio", median_of(steps, "mfu")),
        ("dsrun_step_seconds", step_seconds(steps)),
    )
    yield from ((name, {}, value) for name, value in known if value is not None)
    spread = figures.spread
    most = {} if spread is None else _most(spread.memory)
    yield from (("dsrun_memory_bytes", {"tier": use.tier}, use.nbytes) for use in memory_use(last, most))
    seconds = {} if spread is None else spread.seconds
    for phase in PHASES:
        yield from (
            ("dsrun_phase_seconds", {"phase": phase, "stat": stat}, value)
            for stat, value in _stats(seconds.get(phase), phase_seconds(steps).get(phase))
        )
    for stat, value in _stats(seconds.get("waits"), median_of(steps, "waits_s")):
        yield "dsrun_waits_seconds", {"stat": stat}, value
    for axis, nbytes in list(figures.traffic.items())[:_MOST_AXES]:
        yield "dsrun_traffic_bytes", {"axis": axis}, nbytes
    for name, record in figures.logged.items():
        yield "dsrun_log", {"name": name}, _or_nan(record.values.get(name), is_told=True) or 0.0


def _host_rows(view: RunView) -> Iterator[_Row]:
    hosts: dict[str, list[LiveRank]] = {}
    for use in view.ranks:
        hosts.setdefault(use.live.host, []).append(use.live)
    for host, ranks in hosts.items():
        yield "dsrun_host_ranks", {"host": host}, len(ranks)
        yield "dsrun_host_resident_bytes", {"host": host}, sum(rank.rss_bytes for rank in ranks)
        idle = [rank.idle_s for rank in ranks if rank.idle_s is not None]
        if idle:
            yield "dsrun_host_idle_seconds", {"host": host}, max(idle)


def _stats(spread: StepSpread | None, rank0_s: float | None) -> Iterator[tuple[str, float]]:
    """Returns median and maximum over the ranks, or what rank 0 has where they were not compared."""
    if spread is not None and spread.median and spread.most:
        yield "median", statistics.fmean(spread.median)
        yield "max", statistics.fmean(spread.most)
    elif rank0_s is not None:
        yield "rank0", rank0_s


def _most(memory: Mapping[str, StepSpread]) -> dict[str, tuple[float, int]]:
    return {tier: (each.most[-1], each.most_rank) for tier, each in memory.items() if each.most}


def _or_nan(value: float | None, *, is_told: bool) -> float | None:
    return math.nan if value is None and is_told else value
