"""What a terminal shows of a run's memory."""

from __future__ import annotations

from dsrun.memory_use.findings import growth_of
from dsrun.memory_use.samples import MemorySample, TierUse
from dsrun.memory_use.text import report_lines

MIB = 1 << 20


def moment(phase: str, *, live: int, peak: int) -> MemorySample:
    gpu = TierUse(
        tier="gpu",
        held_bytes=512 * MIB,
        peak_bytes=peak * MIB,
        live_bytes=live * MIB,
        reserved_bytes=512 * MIB,
        kinds=(("parameters", 96 * MIB), ("optimizer states", 32 * MIB)),
    )
    return MemorySample(step=3, phase=phase, tiers=(gpu,))


SAMPLES = (
    moment("start", live=128, peak=128),
    moment("forward", live=320, peak=330),
    moment("backward", live=160, peak=384),
    moment("update", live=128, peak=384),
)


def test_bars_are_as_long_as_what_is_held_and_every_owner_has_its_mark() -> None:
    lines = report_lines(SAMPLES, (), state=(128 * MIB, 128 * MIB + 1_342_177))
    assert lines[0] == "model state 128.0 MiB predicted, 129.3 MiB measured (+1.0%)"
    assert lines[2:7] == [
        "GPU memory over step 3",
        f"  before forward  |{'#' * 10}{'=' * 4}{'*' * 42}|  512.0 MiB",
        f"  before backward |{'#' * 10}{'=' * 4}{'+' * 21}{'*' * 21}|  512.0 MiB",
        f"  after backward  |{'#' * 10}{'=' * 4}{'+' * 4}{'*' * 38}|  512.0 MiB",
        f"  after update    |{'#' * 10}{'=' * 4}{'*' * 42}|  512.0 MiB",
    ]
    assert lines[7:11] == [
        "  # parameters                     96.0 MiB",
        "  = optimizer states               32.0 MiB",
        "  + activations and temporaries   192.0 MiB",
        "  * held free by the allocator    384.0 MiB",
    ]


def test_the_peak_names_its_owners_with_their_shares() -> None:
    lines = report_lines(SAMPLES, (), state=None)
    at = lines.index("GPU peak 384.0 MiB, most of it activations and temporaries, seen in step 3")
    assert lines[at + 1 : at + 5] == [
        "  activations and temporaries                     192.0 MiB   50%",
        "  parameters                                       96.0 MiB   25%",
        "  gradients and temporaries during the backward    64.0 MiB   17%",
        "  optimizer states                                 32.0 MiB    8%",
    ]


def test_fragmentation_and_a_leak_come_with_what_to_do() -> None:
    leak = growth_of("gpu", [(step, step * MIB) for step in range(10, 61, 5)])
    lines = report_lines(SAMPLES, (leak,), state=None)
    at = lines.index("GPU fragmentation 38%: torch has 512.0 MiB reserved, 320.0 MiB in use")
    assert lines[at + 1].startswith("  hint: run with `--env PYTORCH_ALLOC_CONF=expandable_segments:True`")
    assert lines[-2] == "GPU growth +1.0 MiB a step over 50 steps up to 60: a leak"
    assert lines[-1].startswith("  hint: look for what each step keeps")


def test_before_the_first_step_the_text_says_so() -> None:
    assert report_lines((), (), state=None)[0] == "no step was sampled yet"
