"""Keys of a placement that nothing leaves open do nothing, and say so."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.findings import Code
from dsrun.config.load import inspect


def warned(optimizer: dict[str, Any], placement: dict[str, Any]) -> list[str]:
    zero = {"stage": 2, "offload_optimizer": optimizer, "offload_placement": placement}
    findings = inspect({"zero_optimization": zero}).findings
    return [finding.message for finding in findings if finding.code is Code.NO_EFFECT]


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [({"device": "cpu", "ratio": 0.5}, "`ratio` says what stays"), ({}, "nothing leaves the GPU")],
)
def test_room_without_anything_to_decide_has_no_effect(optimizer: dict[str, Any], why: str) -> None:
    (message,) = warned(optimizer, {"device_memory": 10**9})
    assert message.endswith(f"`zero_optimization.offload_placement.device_memory` has no effect: {why}")


def test_room_decides_where_the_ratio_is_left_open() -> None:
    assert warned({"device": "cpu", "ratio": "auto"}, {"device_memory": 10**9, "activation_share": 0.2}) == []
