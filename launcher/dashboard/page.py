"""A page of a terminal about one job: what is known of it -> rows that fit. Reads no file and no clock.

[Note: rows that fit] Each row has a rank of importance. The curve takes what the other rows leave; where they leave too
little, the least important rows are left out. So 24 lines have the whole story of most jobs, and 10 its head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from dsrun.contract.step_records import StepRecord
from dsrun.units import format_bytes, format_count, format_duration

from ..console.status_area import plain
from ..jobs.text import align, command_text, short_duration, state_text
from ..machine.gpus.usage import GpuNow
from ..records.waits import rank_lags
from .braille import curve_rows, value_range
from .measures import (
    LossTrend,
    eta_s,
    loss_trend,
    median_of,
    memory_use,
    phase_seconds,
    rate_median,
    step_seconds,
)
from .rank_table import table_of
from .run_view import RunView
from .thin_curve import ThinCurve

_LABEL = 7
#: Rows that the curve has at least and at most.
_LEAST_CURVE, _MOST_CURVE = 3, 16
#: Columns from which a second curve stands beside the loss.
_TWO_CURVES = 120
#: Columns of the curve in the row of the rate.
_SMALL_CURVE = 16
_BAR = 20
#: Share of a step below which a phase is not written out.
_LEAST_SHARE = 0.005
#: Per cent of a step above which waiting is a warning.
_MUCH_WAITING = 20
_SLOW_RANKS, _LAST_EVENTS = 3, 2
#: Seconds without progress after which a rank is told of.
_IDLE_S = 10.0
#: Own time of a rank over that of the others from which it is told of.
_SLOWER = 1.02
_COLOURS: Mapping[str, str] = {
    "data": "yellow",
    "script": "magenta",
    "forward": "green",
    "backward": "blue",
    "step": "cyan",
    "save": "red",
    "evaluate": "white",
}
_STATE_STYLES = {"running": "bold green", "failed": "bold red", "crashed": "bold red"}
#: What stands for characters that a terminal without Unicode has not.
_ASCII = str.maketrans(
    {"█": "#", "░": ".", "│": "|", "…": ".", "·": ",", **{chr(0x2800 + bits): "*" for bits in range(256)}}
)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row, and how important it is: the greatest number is left out first."""

    text: Text
    importance: int


def page_rows(
    view: RunView,
    *,
    columns: int,
    lines: int,
    log: Sequence[str] | None = None,
    keys: str = "",
    ascii_only: bool = False,
) -> list[Text]:
    """Draws the page.

    Args:
        view: the job at one moment.
        columns: width of the terminal.
        lines: height of the terminal.
        log: last lines of the ranks; None where they are not shown.
        keys: description of the keys, in a row at the end; empty for none.
        ascii_only: whether the terminal shows no more than ASCII.

    Returns:
        rows of at most so many columns, and at most so many of them.
    """
    head, tail = list(_head(view)), list(_tail(view, columns=columns))
    shown = list(log or ())[-max(2, lines // 3) :] if log is not None else []
    foot = [_Row(Text(plain(line), style="dim"), 1) for line in shown]
    if log is not None and not shown:
        foot = [_Row(Text("no line in the log yet", style="dim"), 1)]
    foot += [_Row(Text(keys, style="dim"), 0)] if keys else []
    rank_rows = _rank_rows(view)
    fixed = len(head) + len(foot)
    has_curve = view.figures.last is not None
    least = _LEAST_CURVE if has_curve else 2
    room = max(0, lines - fixed - least)
    while len(tail) > room:
        tail.remove(max(tail, key=lambda row: row.importance))
    left = max(0, lines - fixed - len(tail))
    if has_curve:
        middle = _curves(view, columns=columns, rows=min(left, _MOST_CURVE))
        spare = left - len(middle)
        tail += [_Row(row, 9) for row in rank_rows[:spare]] if spare > 1 else []
    else:
        middle = [Text(plain(line), style="dim") for line in _no_curve(view)][:left]
        tail += [_Row(row, 9) for row in rank_rows[: max(0, left - len(middle))]]
    rows = [*(row.text for row in head), *middle, *(row.text for row in (*tail, *foot))][:lines]
    for row in rows:
        row.no_wrap = True
        if ascii_only:
            row.plain = row.plain.translate(_ASCII).encode("ascii", "replace").decode()
        row.truncate(columns, overflow="ellipsis" if not ascii_only else "crop")
    return rows


def _head(view: RunView) -> Iterator[_Row]:
    job, figures = view.job, view.figures
    last = figures.last
    parts = [job.id, state_text(job)]
    if last is not None:
        parts.append(f"step {_progress(last)}")
        if job.state.is_live and (left_s := eta_s(figures.recent)) is not None:
            parts.append(f"ETA {short_duration(left_s)}")
    ran_s = _ran_s(view)
    parts += [] if ran_s is None else [f"ran {short_duration(ran_s)}"]
    parts += [f"{view.restarts} restart{'s' if view.restarts > 1 else ''}"] if view.restarts else []
    parts += [f"first of {figures.engines} engines"] if figures.engines > 1 else []
    parts += [f"{figures.unread} records damaged or of another version"] if figures.unread else []
    parts += [] if figures.is_complete else [f"{100 * figures.share_read:.0f}% of its records read"]
    text = Text("  ".join(parts), style="bold")
    text.highlight_words([job.state.value], style=_STATE_STYLES.get(job.state.value, "bold"))
    yield _Row(text, 0)
    if last is None:
        yield _Row(Text(plain(command_text(job))), 0)
        return
    yield _Row(_loss_row(loss_trend(list(figures.recent)), has_loss=bool(figures.loss.points())), 0)


def _ran_s(view: RunView) -> float | None:
    job = view.job
    if job.never_ran or job.record.started is None:
        return None
    if job.ended is not None:
        return (job.ended - job.record.started).total_seconds()
    return view.now_s - job.record.started.timestamp() if job.state.is_live else None


def _progress(last: StepRecord) -> str:
    if last.total_steps is None:
        return f"{last.step:,}"
    return f"{last.step:,}/{last.total_steps:,} {100 * last.step / max(1, last.total_steps):.0f}%"


def _loss_row(trend: LossTrend, *, has_loss: bool) -> Text:
    row = _labelled("loss")
    if trend.last is not None:
        row.append(f"{trend.last:.4g}", style="bold")
    else:
        row.append("not finite" if has_loss else "not known", style="bold")
    if trend.smoothed is not None:
        row.append(f"  smoothed {trend.smoothed:.4g}")
    if trend.change is not None and trend.last is not None:
        change = "" if trend.word == "level" else f" {100 * abs(trend.change):.1f}% in 50 steps"
        row.append(f"  {trend.word}{change}")
    return row


def _no_curve(view: RunView) -> list[str]:
    """Says what the job does, and why there is no step to draw."""
    if not view.figures.is_complete:
        return ["its records are being read"]
    if view.figures.start is not None:
        return ["no curve yet: the engine has started and has taken no step"]
    return [
        *([view.doing] if view.doing else []),
        "no curve: only a script that calls dsrun.initialize records its steps",
    ]


def _curves(view: RunView, *, columns: int, rows: int) -> list[Text]:
    """Draws the loss, and on a wide terminal the rate beside it."""
    if rows <= 0:
        return []
    losses = _one_curve(view.figures.loss, columns=columns // 2 if columns >= _TWO_CURVES else columns, rows=rows)
    if columns < _TWO_CURVES:
        return losses
    name = "tokens/s" if view.figures.recent[-1].tokens_per_s is not None else "samples/s"
    rates = _one_curve(view.figures.rate, columns=columns - columns // 2, rows=rows, name=name, low=0.0)
    for row, beside in zip(losses, rates, strict=True):
        row.pad_right(columns // 2 - row.cell_len)
        row.append_text(beside)
    return losses


def _one_curve(curve: ThinCurve, *, columns: int, rows: int, name: str = "", low: float | None = None) -> list[Text]:
    points = curve.points()
    if not points:
        return [Text("") for _ in range(rows)]
    least, high = value_range([value for _, value in points])
    least = least if low is None else low
    labels = [""] * rows
    labels[0], labels[-1] = _short_number(high), _short_number(least) if rows > 1 else ""
    if name and rows > 2:
        labels[rows // 2] = name
    wide = max(_LABEL, *map(len, labels)) + 1
    drawn = curve_rows(points, columns=max(1, columns - wide - 2), rows=rows, low=low)
    return [
        Text.assemble((f"{label:>{wide - 1}} │", "dim"), (row, "cyan"))
        for label, row in zip(labels, drawn, strict=True)
    ]


def _short_number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else format_count(value)


def _tail(view: RunView, *, columns: int) -> Iterator[_Row]:
    figures = view.figures
    last = figures.last
    if last is not None:
        steps = list(figures.recent)
        yield _Row(_optimizer_row(last, skipped=figures.skipped), 2)
        yield _Row(_rate_row(view, steps), 2)
        if (row := _compute_row(steps)) is not None:
            yield _Row(row, 4)
        yield from _phase_rows(steps, columns=columns)
        yield from (_Row(row, 3) for row in _memory_rows(view, last))
    yield from _slow_rows(view)
    if view.gpus:
        yield _Row(_gpu_row(view.gpus), 6)
    if figures.checkpoint is not None:
        yield _Row(_checkpoint_row(view), 4)
    if (row := _logged_row(view)) is not None:
        yield _Row(row, 5)
    for number, event in enumerate(list(view.events)[-_LAST_EVENTS:][::-1]):
        row = _labelled("event" if number == 0 else "")
        row.append(f"{_age(view, event.time_s)}  {plain(event.text)}", style="yellow")
        yield _Row(row, 3 + 3 * number)


def _labelled(label: str) -> Text:
    return Text.assemble((f"{label:<{_LABEL}} ", "dim"))


def _optimizer_row(last: StepRecord, *, skipped: int) -> Text:
    row = _labelled("update")
    rates = last.lrs or (last.lr,)
    shown = f"{rates[0]:.3g}" if len(set(rates)) == 1 else f"{min(rates):.3g} to {max(rates):.3g}"
    row.append(f"lr {shown}")
    if last.non_finite is not None:
        row.append(f"  gradient of {plain(last.non_finite)} not finite", style="red")
    else:
        row.append(f"  norm {'not finite' if last.grad_norm is None else f'{last.grad_norm:.4g}'}")
    if last.loss_scale is not None:
        row.append(f"  loss scale {last.loss_scale:g}")
    row.append(f"  {skipped:,} step{'' if skipped == 1 else 's'} skipped", style="yellow" if skipped else "")
    return row


def _rate_row(view: RunView, steps: Sequence[StepRecord]) -> Text:
    row = _labelled("speed")
    seconds = step_seconds(steps)
    row.append(f"{format_duration(seconds)} a step" if seconds is not None else "")
    rate = rate_median(steps)
    if rate is not None:
        has_tokens = steps[-1].tokens_per_s is not None
        row.append(f"  {format_count(rate)} {'tokens' if has_tokens else 'samples'}/s", style="bold")
        if has_tokens and view.job.record.ranks > 1:
            row.append(f", {format_count(rate / view.job.record.ranks)} a rank")
        row.append("  ")
        row.append(curve_rows(view.figures.rate.points(), columns=_SMALL_CURVE, rows=1, low=0.0)[0], style="cyan")
    return row


def _compute_row(steps: Sequence[StepRecord]) -> Text | None:
    model, hardware = median_of(steps, "model_tflops"), median_of(steps, "hardware_tflops")
    if model is None:
        return None
    row = _labelled("compute")
    row.append(f"{_tflops(model)} TFLOP/s of the model")
    if (mfu := median_of(steps, "mfu")) is not None:
        row.append(f", MFU {100 * mfu:.1f}%", style="bold")
    if hardware is not None and hardware != model:
        row.append(f"  with recomputation {_tflops(hardware)}")
        if (hfu := median_of(steps, "hfu")) is not None:
            row.append(f", HFU {100 * hfu:.1f}%")
    return row


def _tflops(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _phase_rows(steps: Sequence[StepRecord], *, columns: int) -> Iterator[_Row]:
    """Draws the phases of a step as a bar; below it those without room in it, and the waits."""
    seconds = phase_seconds(steps)
    total = sum(seconds.values())
    if total <= 0:
        return
    bar, beside = _labelled("step"), _labelled("")
    wide = max(10, min(columns, 120) - _LABEL - 1)
    drawn, until = 0, 0.0
    for name, value in seconds.items():
        until += value
        cells = round(until / total * wide) - drawn
        drawn += cells
        text = f"{name} {100 * value / total:.0f}%"
        # What has no room in the bar stands below it. The mark tells two phases apart without colour too.
        fits = len(text) < cells
        bar.append((text if fits else "").center(cells - 1) + "│" if cells else "", style=f"black on {_COLOURS[name]}")
        if not fits and value >= _LEAST_SHARE * total:
            beside.append(f"{text}  ", style=_COLOURS[name])
    waits_s, pipeline_s = median_of(steps, "waits_s"), median_of(steps, "pipeline_wait_s")
    if waits_s is not None:
        share = 100 * waits_s / total
        beside.append(f"{share:.0f}% waiting for ranks", style="red" if share > _MUCH_WAITING else "")
    if pipeline_s is not None:
        beside.append(f", {100 * pipeline_s / total:.0f}% for stages")
    yield _Row(bar, 4)
    yield _Row(beside, 3)


def _memory_rows(view: RunView, last: StepRecord) -> Iterator[Text]:
    spread = view.figures.spread
    most = (
        {}
        if spread is None
        else {tier: (each.most[-1], each.most_rank) for tier, each in spread.memory.items() if each.most}
    )
    for number, use in enumerate(memory_use(last, most)):
        row = _labelled("memory" if number == 0 else "")
        total = view.memory_total.get(use.tier)
        row.append(f"{use.tier:<6} ")
        if total:
            share = min(1.0, use.nbytes / total)
            filled = round(share * _BAR)
            style = "red" if share > 0.95 else "yellow" if share > 0.85 else "green"
            row.append("█" * filled, style=style).append("░" * (_BAR - filled), style="dim")
            row.append(f" {100 * share:.0f}% of {format_bytes(total)},")
        row.append(f" {format_bytes(use.nbytes)} on rank {use.rank}")
        yield row


def _slow_rows(view: RunView) -> Iterator[_Row]:
    """Says which ranks make no progress, and which the others wait for; the slowest first."""
    texts: list[tuple[str, str]] = []
    for use in view.ranks:
        live = use.live
        if live.idle_s is not None and live.idle_s >= _IDLE_S:
            doing = live.collective or live.phase or "a phase that it does not name"
            texts.append(
                (f"rank {live.rank} on {live.host}  no progress for {short_duration(live.idle_s)}, in {doing}", "red")
            )
    waits = view.figures.waits
    for lag in rank_lags(waits) if waits is not None and waits.ranks > 1 else ():
        if lag.others_s <= 0 or lag.own_s < _SLOWER * lag.others_s:
            break
        host = view.host_of(lag.rank)
        text = f"rank {lag.rank}{f' on {host}' if host else ''}  +{format_duration(lag.lag_s)} a step"
        text += f", {lag.own_s / lag.others_s:.2f} x the others"
        texts.append((f"{text}{'; they wait for it' if lag.is_slow else ''}", "yellow" if lag.is_slow else ""))
    for number, (text, style) in enumerate(texts[:_SLOW_RANKS]):
        row = _labelled("slow" if number == 0 else "")
        row.append(plain(text), style=style)
        yield _Row(row, 3 if number == 0 else 7 + number)


def _gpu_row(gpus: Sequence[GpuNow]) -> Text:
    row = _labelled("gpus")
    cells: list[str] = []
    for gpu in gpus:
        parts = [f"{gpu.index}:"]
        parts += [] if gpu.percent is None else [f"{gpu.percent}%"]
        parts += (
            []
            if gpu.memory_used_bytes is None
            else [format_bytes(gpu.memory_used_bytes).replace("iB", "").replace(" ", "")]
        )
        cells.append(" ".join(parts))
    row.append("  ".join(cells))
    return row


def _checkpoint_row(view: RunView) -> Text:
    row, saved = _labelled("saved"), view.figures.checkpoint
    assert saved is not None, "the row is drawn where there is a checkpoint"
    row.append(f"{plain(str(saved.get('tag') or saved.get('path', '')))}")
    if isinstance(time_s := saved.get("time"), int | float):
        row.append(f", {_age(view, float(time_s))} ago" if view.job.state.is_live else "")
    if isinstance(nbytes := saved.get("bytes"), int):
        row.append(f", {format_bytes(nbytes)}")
    if isinstance(seconds := saved.get("seconds"), int | float):
        row.append(f" in {format_duration(seconds)}")
    return row


def _logged_row(view: RunView) -> Text | None:
    if not view.figures.logged:
        return None
    row = _labelled("script")
    shown = [
        f"{plain(name)} {'not finite' if (value := each.values.get(name)) is None else f'{value:.4g}'}"
        for name, each in reversed(view.figures.logged.items())
    ]
    row.append("  ".join(shown))
    return row


def _rank_rows(view: RunView) -> list[Text]:
    if not view.ranks:
        return []
    heading, *rows = align(table_of(view.ranks))
    return [Text(plain(heading), style="bold"), *(Text(plain(row)) for row in rows)]


def _age(view: RunView, time_s: float) -> str:
    return short_duration(max(0.0, view.now_s - time_s)) if math.isfinite(time_s) else "?"
