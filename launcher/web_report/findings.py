"""What could be faster in a run: rules, each with its figure and a way out. Pure; docs/guides/speed.md explains them.

A rule speaks only of what was recorded, and only where acting on it could gain a few hundredths of the time or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dsrun.contract.wait_records import WaitRecord
from dsrun.units import format_bytes, format_duration

from ..console.rank_set import format_rank_set
from ..records.waits import waited_for
from .run_figures import RunFigures

#: Shares of a step, or of all steps, from which on a rule speaks.
DATA_SHARE, SCRIPT_SHARE, BUBBLE_SHARE, WAITS_SHARE = 0.10, 0.15, 0.10, 0.20
SAVE_SHARE, EVALUATE_SHARE, LOST_SHARE, SLOW_SHARE = 0.03, 0.20, 0.05, 0.05
SKIPPED_SHARE, PADDING_SHARE, AGAIN_SHARE = 0.02, 0.15, 0.15
#: Share of the devices' peak below which a run is far from what such devices do with large models.
LOW_MFU = 0.30
#: Shares of a device's memory: above the one there is no room, below the other half of it is unused.
FULL_SHARE, EMPTY_SHARE = 0.92, 0.50


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs time.

    Attributes:
        share: Share of the time that it costs, as far as that is known; the largest come first.
        text: Fault, with its figure.
        way_out: Advice on what to do.
    """

    share: float
    text: str
    way_out: str


def findings_of(figures: RunFigures, waits: WaitRecord | None, *, device_bytes: float = math.nan) -> list[Finding]:
    """Returns what could be faster, the largest share first.

    Args:
        figures: Figures of the run.
        waits: Newest record of waits; None where there is none.
        device_bytes: Memory of the smallest device of the job; NaN where it is not known.
    """
    found = [
        *_phases(figures),
        *_waits(figures, waits),
        *_computing(figures),
        *_memory(figures, device_bytes),
        *_interruptions(figures),
    ]
    return sorted(found, key=lambda each: -each.share)


def _phases(figures: RunFigures) -> Iterator[Finding]:
    data = figures.shares.get("data", 0.0)
    if data > DATA_SHARE:
        yield Finding(
            data,
            f"The loader takes {_percent(data)} of a step, {_of_step(figures, data)}.",
            "Raise `dataloader_num_workers`, or `num_workers` of your own loader; prepare samples (decode, tokenise) "
            "before the run; keep them on a local disk.",
        )
    script = figures.shares.get("script", 0.0)
    if script > SCRIPT_SHARE:
        yield Finding(
            script,
            f"The script itself takes {_percent(script)} of a step, {_of_step(figures, script)}.",
            "Look for `.item()`, `print` of tensors and moves to the device between two steps; do them every so many "
            "steps. `dsrun run --profile steps=10:13` shows where.",
        )
    evaluate = figures.shares.get("evaluate", 0.0)
    if evaluate > EVALUATE_SHARE:
        yield Finding(
            evaluate, f"Evaluation takes {_percent(evaluate)} of the time.", "Evaluate less often, or on fewer samples."
        )
    save = figures.shares.get("save", 0.0)
    if save > SAVE_SHARE:
        yield Finding(
            save,
            f"Training waits for checkpoints {_percent(save)} of the time.",
            "Leave `checkpoint.asynchronous` on and save to a faster disk, or less often.",
        )


def _waits(figures: RunFigures, waits: WaitRecord | None) -> Iterator[Finding]:
    bubble = figures.shares.get("pipeline_wait", 0.0)
    if bubble > BUBBLE_SHARE:
        yield Finding(
            bubble,
            f"Rank 0 waits {_percent(bubble)} of a step for other pipeline stages.",
            "More micro batches a step (`gradient_accumulation_steps`), another `pipeline.schedule`, or stages of "
            "equal length; `dsrun top` shows each stage's bubble.",
        )
    slow = None if waits is None else waited_for(waits)
    if slow is not None and waits is not None and waits.step_s > 0:
        many = len(slow.ranks) > 1
        where = f", most of it in {slow.collective or slow.kind}" if slow.collective or slow.kind else ""
        yield Finding(
            slow.lost_s / waits.step_s,
            f"Rank{'s' * many} {format_rank_set(slow.ranks)} {'are' if many else 'is'} waited for: the others wait "
            f"{format_duration(slow.lost_s)} a step longer, {_percent(slow.lost_s / waits.step_s)} of a step{where}.",
            "Look at that rank's host with `dsrun probe` (heat, other programs, its disk), and at whether its batches "
            "are longer. `dsrun show JOB --waits` has all collectives.",
        )
        return
    share = figures.shares.get("waits", 0.0) - bubble
    if share > WAITS_SHARE:
        yield Finding(
            share,
            f"Rank 0 waits {_percent(share)} of a step for other ranks, and no rank stands out: that is data on its "
            "way.",
            "Move less: a larger micro batch, more accumulation steps, a lower ZeRO stage; or a faster network between "
            "the hosts (`dsrun probe --bench`).",
        )


def _computing(figures: RunFigures) -> Iterator[Finding]:
    again = 1 - figures.model_tflops / figures.hardware_tflops if figures.hardware_tflops > 0 else math.nan
    if again > AGAIN_SHARE:
        yield Finding(
            again,
            f"{_percent(again)} of the operations are computed a second time, to save memory.",
            "Where there is memory left, recompute fewer blocks: `activation_checkpointing`, see the guide on "
            "activations.",
        )
    if figures.mfu < LOW_MFU:
        yield Finding(
            0.0,
            f"The model's operations use {_percent(figures.mfu)} of what the devices can do (MFU).",
            "Larger micro batches, bf16, fused attention and `torch.compile` raise it, once nothing else in this list "
            "is left. Small models stay low.",
        )
    if figures.padding > PADDING_SHARE:
        yield Finding(
            figures.padding,
            f"{_percent(figures.padding)} of the tokens are padding.",
            "Pack samples into one sequence, or sort them by length.",
        )
    skipped = figures.skipped / figures.steps if figures.steps else 0.0
    if skipped > SKIPPED_SHARE:
        yield Finding(
            skipped,
            f"{figures.skipped} of {figures.steps} updates were skipped, for gradients that were not finite.",
            "Train in bf16 instead of fp16, lower the learning rate, or clip gradients.",
        )


def _memory(figures: RunFigures, device_bytes: float) -> Iterator[Finding]:
    peak = figures.peak_bytes.get("gpu", math.nan)
    share = peak / device_bytes if device_bytes > 0 else math.nan
    of = f"{format_bytes(peak)} of {format_bytes(device_bytes)}, {_percent(share)}" if share == share else ""
    if share > FULL_SHARE:
        yield Finding(
            0.0,
            f"Memory of the device is nearly full: {of}.",
            "A longer sample may end the run. `dsrun memory JOB` shows what holds it, `dsrun plan` what would save "
            "most for least time.",
        )
    elif share < EMPTY_SHARE:
        yield Finding(
            0.0,
            f"More than half of the device's memory is unused: the peak is {of}.",
            "A larger micro batch, less recomputation, less offload or a lower ZeRO stage may be faster; "
            "`dsrun plan` says which fit.",
        )


def _interruptions(figures: RunFigures) -> Iterator[Finding]:
    lost = figures.lost_s / figures.whole_s if figures.whole_s > 0 else 0.0
    if lost > LOST_SHARE:
        yield Finding(
            lost,
            f"Failures took {format_duration(figures.lost_s)}, {_percent(lost)} of the run.",
            "Save checkpoints more often, or keep copies in memory: less is taken again after a restart.",
        )
    if figures.slow_share > SLOW_SHARE:
        yield Finding(
            figures.slow_share,
            f"Some steps take more than three times the median; beyond that they took {_percent(figures.slow_share)} "
            "of the time.",
            "Look at what the script does in them, and at the loader when a file or an epoch ends.",
        )


def _of_step(figures: RunFigures, share: float) -> str:
    return format_duration(share * figures.step_s)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
