"""Plots of one job, and of several over each other: which figures are drawn, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from dsrun.contract.step_records import PHASES
from dsrun.contract.wait_records import MOST_RANKS
from dsrun.units import format_bytes, format_count, format_duration

from ..records.recorded_run import Columns, RecordedRun
from .axes import Unit
from .curves import bucket_bounds, mean, smoothed
from .plots import Line, Mark, Plot, area_plot, heat_plot, line_plot
from .run_figures import RunFigures, loss_window, samples_per_s, waits_of_ranks

#: Columns and rows of a heat map.
_HEAT_COLUMNS, _HEAT_ROWS = 120, 64
#: The script's figures that have a plot.
_MOST_FIGURES = 40
_PHASE_NAMES = {
    "data": "loader",
    "script": "script",
    "forward": "forward",
    "backward": "backward",
    "step": "update",
    "save": "checkpoint",
    "evaluate": "evaluation",
}
_TIER_NAMES = {"gpu": "device", "cpu": "host (resident)", "disk": "disk"}


def present(plots: Sequence[Plot | None]) -> list[Plot]:
    """Returns the plots that there are."""
    return [plot for plot in plots if plot is not None]


def loss_plots(run: RecordedRun, figures: RunFigures) -> tuple[Plot, Plot] | None:
    """Returns the loss over steps and over time; None where none is known."""
    steps = run.steps
    loss, window = steps["loss"], loss_window(len(steps))
    sentence = f"Mean loss of a step, and smoothed over about {window} steps"
    if figures.is_loss_lost:
        sentence += f"; at step {figures.last_step} it is not finite"
    elif math.isfinite(figures.last_loss):
        sentence += f": {figures.last_loss:.4g} at step {figures.last_step}"
    sentence += "."
    lost = sum(rewind.steps for rewind in run.rewinds)
    if lost:
        sentence += f" {lost} steps were taken again after a failure; the later ones are drawn."
    mean_loss = _smoothed_to_its_end(loss, window)
    plots: list[Plot] = []
    begin_s = run.starts[0]["time"] if run.starts else steps["time"][0] if len(steps) else 0.0
    for xs, unit, name in (
        (steps["step"], Unit.COUNT, "step"),
        ([each - begin_s for each in steps["time"]], Unit.SECONDS, "time since the first start"),
    ):
        by_time = unit is Unit.SECONDS
        missing = [(x, x) for x, value in zip(xs, loss, strict=True) if math.isnan(value)]
        marks = [Mark("not finite", "missing", missing if len(missing) < len(xs) else [])]
        if not by_time:
            spans = [(float(each.step), float(each.step + each.steps)) for each in run.rewinds]
            marks.append(Mark("taken again", "rewound", spans))
        else:
            spans = [(each.time - begin_s, each.time - begin_s) for each in run.rewinds]
            marks.append(Mark("started again", "failure", spans))
        plot = line_plot(
            "Loss",
            sentence,
            [Line("loss", xs, loss, is_faint=True), Line("smoothed", xs, mean_loss)],
            x_unit=unit,
            x_name=name,
            marks=marks,
            may_be_log=True,
            height=280,
        )
        if plot is None:
            return None
        plots.append(plot)
    return plots[0], plots[1]


def _smoothed_to_its_end(values: Sequence[float], window: int) -> list[float]:
    """Returns values smoothed, and NaN behind the last that is there: what is not known does not go on as it was."""
    means = smoothed(values, window)
    end = next((at + 1 for at in reversed(range(len(values))) if math.isfinite(values[at])), 0)
    return [*means[:end], *(math.nan for _ in means[end:])]


def optimizer_plots(run: RecordedRun, figures: RunFigures) -> list[Plot]:
    """Returns learning rate, norm of the gradients and loss scale."""
    steps = run.steps
    xs = steps["step"]
    norm = steps["grad_norm"]
    skipped = [(x, x) for x, applied in zip(xs, steps["applied"], strict=True) if applied == 0]
    infinite = [(x, x) for x, value in zip(xs, norm, strict=True) if math.isnan(value)]
    told = f"{figures.skipped} updates were skipped." if figures.skipped else "No update was skipped."
    return present(
        [
            line_plot("Learning rate", "Rate of the first group.", [Line("lr", xs, steps["lr"], 2)], from_zero=True),
            line_plot(
                "Gradient norm",
                f"Norm of all gradients before clipping. {told}",
                [Line("norm", xs, norm, 1)],
                marks=[
                    Mark("skipped", "failure", skipped),
                    Mark("not finite", "missing", infinite if len(infinite) < len(xs) else []),
                ],
                may_be_log=True,
            ),
            line_plot(
                "Loss scale", "Factor of the losses, for fp16.", [Line("scale", xs, steps["loss_scale"], 3)],
                may_be_log=True, unit=Unit.COUNT,
            ),
        ]
    )  # fmt: skip


def speed_plots(run: RecordedRun, figures: RunFigures) -> list[Plot]:
    """Returns tokens or samples a second, TFLOP/s and MFU."""
    steps = run.steps
    xs = steps["step"]
    if steps.has("tokens_per_s"):
        rate, name, median = steps["tokens_per_s"], "tokens", figures.tokens_per_s
    else:
        rate, name, median = samples_per_s(run), "samples", figures.samples_per_s
    window = max(5, len(xs) // 100)
    return present(
        [
            line_plot(
                f"{name.capitalize()} a second",
                f"{name.capitalize()} of all ranks together, {format_count(median)} a second in the middle (median)."
                if math.isfinite(median)
                else "",
                [Line(name, xs, rate, 0, is_faint=True), Line("smoothed", xs, smoothed(rate, window), 0)],
                unit=Unit.COUNT,
                from_zero=True,
            ),
            line_plot(
                "TFLOP/s",
                "Operations of forward and backward of all devices; the hardware's count what is computed again.",
                [
                    Line("model", xs, smoothed_if_known(steps, "model_tflops", window), 0),
                    Line("hardware", xs, smoothed_if_known(steps, "hardware_tflops", window), 1),
                ],
                from_zero=True,
            ),
            line_plot(
                "MFU",
                f"Share of the devices' peak that the model's operations use: {100 * figures.mfu:.3g}% (median)."
                if math.isfinite(figures.mfu)
                else "",
                [
                    Line("model (MFU)", xs, smoothed_if_known(steps, "mfu", window), 0),
                    Line("hardware (HFU)", xs, smoothed_if_known(steps, "hfu", window), 1),
                ],
                unit=Unit.SHARE,
                from_zero=True,
            ),
        ]
    )


def smoothed_if_known(steps: Columns, name: str, window: int) -> Sequence[float]:
    """Returns a column smoothed, and all NaN where no step has it."""
    return smoothed(steps[name], window) if steps.has(name) else steps[name]


def phase_plots(run: RecordedRun, figures: RunFigures) -> list[Plot]:
    """Returns the time of a step by phase; the time alone where phases are not known."""
    steps = run.steps
    xs = steps["step"]
    layers = [(_PHASE_NAMES[name], steps[f"phases.{name}"]) for name in PHASES if steps.has(f"phases.{name}")]
    if layers:
        whole = f"Seconds of a step on rank 0, {format_duration(figures.step_s)} (median), by what it does."
        return present([area_plot("Step time by phase", whole, xs, layers, unit=Unit.SECONDS)])
    sentence = f"Seconds of a step on rank 0, {format_duration(figures.step_s)} (median)."
    return present([line_plot("Step time", sentence, [Line("step", xs, steps["seconds"])], unit=Unit.SECONDS)])


def phase_rows(run: RecordedRun, figures: RunFigures) -> list[list[str]]:
    """Returns a row for each phase: its share, and seconds of the rank that has least, in the middle and most."""
    rows: list[list[str]] = []
    for name in (*PHASES, "waits", "pipeline_wait"):
        share = figures.shares.get(name)
        shown = {"waits": "of these: waits for ranks", "pipeline_wait": "of these: for other stages"}.get(name)
        cells = [shown or _PHASE_NAMES[name], "–" if share is None else f"{100 * share:.1f}%"]
        if run.spreads.has(f"{name}.median"):
            cells += [format_duration(mean(run.spreads[f"{name}.{which}"])) for which in ("least", "median", "most")]
            cells.append(_commonest(run.spreads[f"{name}.most_rank"]))
        elif share is None:
            continue
        rows.append(cells)
    width = max(map(len, rows), default=0)
    return [row + ["–"] * (width - len(row)) for row in rows]


def _commonest(ranks: Sequence[float]) -> str:
    known = [int(rank) for rank in ranks if math.isfinite(rank)]
    rank = max(set(known), key=known.count)
    return f"{rank} ({100 * known.count(rank) // len(known)}% of the time)"


def memory_plots(run: RecordedRun, figures: RunFigures, sizes: Mapping[str, float]) -> list[Plot]:
    """Returns memory by tier.

    Args:
        run: Records of the run.
        figures: Figures of the run.
        sizes: Bytes that a tier has at most, where they are known.
    """
    plots: list[Plot | None] = []
    for number, name in enumerate(run.steps.names("memory.")):
        tier = name.removeprefix("memory.")
        title = f"Memory: {_TIER_NAMES.get(tier, tier)}"
        peak, size = figures.peak_bytes.get(tier, math.nan), sizes.get(tier, math.nan)
        of = f" of {format_bytes(size)}" if math.isfinite(size) else ""
        lines = [Line("rank 0", run.steps["step"], run.steps[name], number)]
        spread = f"{name}.most"
        if run.spreads.has(spread):
            lines.append(Line("rank that has most", run.spreads["step"], run.spreads[spread], number + 1))
        limits = [("size", size)] if peak > size / 4 else []
        sentence = f"Bytes in use at the end of a step; the peak is {format_bytes(peak)}{of}."
        plots.append(line_plot(title, sentence, lines, unit=Unit.BYTES, from_zero=True, limits=limits))
    if not run.steps.has("memory.gpu") and not run.steps.has("memory.cpu") and run.steps.has("memory_bytes"):
        used = run.steps["memory_bytes"]
        if max(used) > 0:
            sentence = "Most bytes of rank 0's device so far; on a CPU, resident bytes."
            line = Line("rank 0", run.steps["step"], used)
            plots.append(line_plot("Memory", sentence, [line], unit=Unit.BYTES, from_zero=True))
    return present(plots)


def waits_plot(run: RecordedRun) -> Plot | None:
    """Returns rank by time, the darker the longer a rank has waited for others; None where no wait was recorded."""
    shares = waits_of_ranks(run)
    if len(shares) < 2:
        return None
    # Those that wait least are those that others wait for: of many ranks, these are shown.
    shown = sorted(sorted(shares, key=shares.__getitem__)[:_HEAT_ROWS])
    bounds = bucket_bounds(len(run.waits), _HEAT_COLUMNS)
    step_s = run.waits["step_s"]
    rows: list[tuple[str, list[float]]] = []
    for rank in shown:
        waited = run.waits[str(rank)]
        parts = [each / whole if whole > 0 else math.nan for each, whole in zip(waited, step_s, strict=True)]
        rows.append((str(rank), [mean(parts[begin:end]) for begin, end in bounds]))
    steps = run.waits["step"]
    least = min(shares, key=shares.__getitem__)
    most = max(shares, key=shares.__getitem__)
    sentence = (
        f"Share of a step that each rank waits for others. Rank {least} waits least ({100 * shares[least]:.1f}%), "
        f"rank {most} most ({100 * shares[most]:.1f}%): a row that stays light among dark ones is who they wait for."
    )
    if len(shares) > len(shown) or len(shares) == MOST_RANKS:
        sentence += f" Of more than {MOST_RANKS} ranks, those that wait least are shown."
    return heat_plot("Waits by rank", sentence, [steps[end - 1] for _, end in bounds], rows, unit=Unit.SHARE)


def traffic_plot(run: RecordedRun) -> Plot | None:
    """Returns bytes a step by axis; None where none is known."""
    names = run.steps.names("traffic.")
    axes = [name.removeprefix("traffic.") for name in names]
    sentence = "Bytes that rank 0 hands to collectives and messages in a step, by axis of ranks."
    return area_plot(
        "Traffic by axis",
        sentence,
        run.steps["step"],
        list(zip(axes, (run.steps[name] for name in names), strict=True)),
        unit=Unit.BYTES,
    )


def script_plots(run: RecordedRun) -> Iterator[Plot]:
    """Yields a plot for each of the script's own figures, as far as a page has room."""
    for number, (name, columns) in enumerate(list(run.figures.items())[:_MOST_FIGURES]):
        values = columns["value"]
        known = [value for value in values if math.isfinite(value)]
        missing = [(x, x) for x, value in zip(columns["step"], values, strict=True) if math.isnan(value)]
        if not known:
            continue
        sentence = f"{known[-1]:.4g} last; from {min(known):.4g} to {max(known):.4g}."
        plot = line_plot(
            name,
            sentence,
            [Line(name, columns["step"], values, number)],
            marks=[Mark("not finite", "missing", missing)],
            may_be_log=True,
            height=140,
        )
        if plot is not None:
            yield plot


def overlay_plots(runs: Sequence[tuple[str, RecordedRun]]) -> list[Plot]:
    """Returns curves of several jobs over each other: loss by step and by time, throughput, step time, memory.

    Args:
        runs: Names of the jobs and their records.
    """
    known = [(number, name, run) for number, (name, run) in enumerate(runs) if len(run.steps)]

    def smooth(run: RecordedRun, values: Sequence[float]) -> list[float]:
        return smoothed(values, loss_window(len(run.steps)))

    losses = {at: _smoothed_to_its_end(run.steps["loss"], loss_window(len(run.steps))) for at, _, run in known}
    by_step = [Line(name, run.steps["step"], losses[at], at) for at, name, run in known]
    by_time = [Line(name, _since_start(run), losses[at], at) for at, name, run in known]
    has_tokens = all(run.steps.has("tokens_per_s") for _, _, run in known)
    rates = [
        Line(
            name,
            run.steps["step"],
            smooth(run, run.steps["tokens_per_s"] if has_tokens else samples_per_s(run)),
            at,
        )
        for at, name, run in known
    ]
    seconds = [Line(name, run.steps["step"], smooth(run, run.steps["seconds"]), at) for at, name, run in known]
    what = "Tokens" if has_tokens else "Samples"
    plots = [
        line_plot("Loss by step", "Smoothed loss of each job.", by_step, may_be_log=True, height=280),
        line_plot(
            "Loss by time",
            "The same over the time since each job's first start.",
            by_time,
            x_unit=Unit.SECONDS,
            x_name="time since the first start",
            may_be_log=True,
            height=280,
        ),
        line_plot(f"{what} a second", f"{what} of all ranks together, smoothed.", rates, unit=Unit.COUNT,
                  from_zero=True),
        line_plot("Step time", "Seconds of a step, smoothed.", seconds, unit=Unit.SECONDS, from_zero=True),
    ]  # fmt: skip
    for tier, tier_name in _TIER_NAMES.items():
        memory = [
            Line(name, run.steps["step"], run.steps[f"memory.{tier}"], at)
            for at, name, run in known
            if run.steps.has(f"memory.{tier}")
        ]
        title = f"Memory: {tier_name}"
        plots.append(line_plot(title, "Bytes of rank 0 in use.", memory, unit=Unit.BYTES, from_zero=True))
    return present(plots)


def _since_start(run: RecordedRun) -> list[float]:
    begin_s = run.starts[0]["time"] if run.starts else run.steps["time"][0]
    return [each - begin_s for each in run.steps["time"]]
