"""Rules on what could be faster: each speaks from its figure on, and says nothing below."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.launcher.web_report.findings import findings_of
from dsrun.launcher.web_report.run_figures import RunFigures
from support.recorded_runs import a_wait

GIB = 1 << 30
#: A run at which nothing is to be said.
FAST = RunFigures(
    steps=1000,
    last_step=1000,
    step_s=0.5,
    model_tflops=400.0,
    hardware_tflops=420.0,
    mfu=0.5,
    padding=0.05,
    whole_s=500.0,
    slow_share=0.01,
    peak_bytes={"gpu": 60.0 * GIB},
    shares={"data": 0.02, "script": 0.01, "forward": 0.3, "backward": 0.6, "waits": 0.05, "save": 0.005},
)
DEVICE = 80.0 * GIB


def told(**changes: object) -> list[str]:
    return [each.text for each in findings_of(replace(FAST, **changes), None, device_bytes=DEVICE)]  # type: ignore[arg-type]


def test_nothing_is_said_of_a_run_that_is_fast() -> None:
    assert told() == []
    assert findings_of(RunFigures(steps=3), None) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shares": {"data": 0.23}}, "The loader takes 23 % of a step, 115 ms."),
        ({"shares": {"script": 0.3}}, "The script itself takes 30 % of a step, 150 ms."),
        ({"shares": {"save": 0.05}}, "Training waits for checkpoints 5 % of the time."),
        ({"shares": {"evaluate": 0.4}}, "Evaluation takes 40 % of the time."),
        ({"shares": {"waits": 0.3, "pipeline_wait": 0.25}}, "Rank 0 waits 25 % of a step for other pipeline stages."),
        (
            {"shares": {"waits": 0.3}},
            "Rank 0 waits 30 % of a step for other ranks, and no rank stands out: that is data on its way.",
        ),
        ({"hardware_tflops": 540.0}, "26 % of the operations are computed a second time, to save memory."),
        ({"mfu": 0.12}, "The model's operations use 12 % of what the devices can do (MFU)."),
        ({"padding": 0.4}, "40 % of the tokens are padding."),
        ({"skipped": 50}, "50 of 1000 updates were skipped, for gradients that were not finite."),
        ({"peak_bytes": {"gpu": 78.0 * GIB}}, "Memory of the device is nearly full: 78.0 GiB of 80.0 GiB, 98 %."),
        (
            {"peak_bytes": {"gpu": 20.0 * GIB}},
            "More than half of the device's memory is unused: the peak is 20.0 GiB of 80.0 GiB, 25 %.",
        ),
        ({"lost_s": 100.0}, "Failures took 1m 40s, 20 % of the run."),
        (
            {"slow_share": 0.2},
            "Some steps take more than three times the median; beyond that they took 20 % of the time.",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_each_rule_has_its_figure(changes: dict[str, object], text: str) -> None:
    assert told(**changes) == [text]


def test_a_rank_that_the_others_wait_for_is_named() -> None:
    waits = replace(a_wait(40), waited_s={0: 0.02, 1: 0.02, 2: 0.001, 3: 0.02})
    waits = replace(waits, total=replace(waits.total, least_s=0.001, median_s=0.02, most_s=0.02, least_rank=2))
    (found,) = findings_of(FAST, waits, device_bytes=DEVICE)
    assert found.text.startswith("Rank 2 is waited for: the others wait 19 ms a step longer, 38 % of a step")
    assert "`dsrun show JOB --waits`" in found.way_out


def test_the_largest_share_comes_first() -> None:
    texts = told(shares={"data": 0.2, "save": 0.3}, mfu=0.1)
    assert [text.split()[1] for text in texts] == ["waits", "loader", "model's"]
