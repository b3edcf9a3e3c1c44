"""Keys that work for some values and not yet for others."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest

from dsrun.config.findings import Code, Report, Severity
from dsrun.config.knob import Section, knob
from dsrun.config.status import judge
from dsrun.config.text.source import read_source


class Store(Section):
    """Where something lives."""

    default_reason = "move it to a drive"
    switch = ("device", "none")

    device: Annotated[Literal["none", "cpu", "nvme"], knob("Where it lives.", planned=("nvme",))] = "none"
    path: Annotated[str | None, knob("Folder.")] = None


def findings_of(values: dict[str, object]) -> list[tuple[Severity, Code, str]]:
    root, _ = read_source(values)
    report = Report()
    judge(Store(**values), root, "store", zero_stage=3, report=report)  # pyright: ignore[reportArgumentType]
    return [(finding.severity, finding.code, finding.message) for finding in report.findings]


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_value_that_works_says_nothing(device: str) -> None:
    assert findings_of({"device": device, "path": "/x"}) == []


def test_a_planned_value_of_a_key_that_works_is_refused_with_what_is_missing() -> None:
    message = '`store.device` is "nvme"; this version does not move it to a drive yet'
    assert findings_of({"device": "nvme", "path": "/x"}) == [(Severity.ERROR, Code.PLANNED, message)]
