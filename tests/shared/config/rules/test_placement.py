"""Keys of a placement that nothing leaves open do nothing, and say so."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.findings import Code, Severity
from dsrun.config.load import inspect


def warned(optimizer: dict[str, Any], placement: dict[str, Any]) -> list[str]:
    zero = {"stage": 2, "offload_optimizer": optimizer, "offload_placement": placement}
    findings = inspect({"zero_optimization": zero}).findings
    return [finding.message for finding in findings if finding.code is Code.NO_EFFECT]


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [({"device": "cpu", "ratio": 0.5}, "`ratio` says what stays"), ({}, "nothing leaves the GPU")],
)
def test_room_without_anything_to_decide_has_no_effect(optimizer: dict[str, Any], reason: str) -> None:
    (message,) = warned(optimizer, {"device_memory": 10**9})
    assert message.endswith(f"`zero_optimization.offload_placement.device_memory` has no effect: {reason}")


def test_room_decides_where_the_ratio_is_left_open() -> None:
    assert warned({"device": "cpu", "ratio": "auto"}, {"device_memory": 10**9, "activation_share": 0.2}) == []


@pytest.mark.parametrize(
    ("zero", "reason"),
    [
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, "states have their places on a drive"),
        ({"offload_param": {"device": "cpu"}}, "keeps parameters off the GPU"),
        ({"offload_optimizer": {"super_offload": True}}, "keeps a second set of states"),
    ],
)
def test_states_that_cannot_move_are_not_looked_at_again(zero: dict[str, Any], reason: str) -> None:
    optimizer = {"device": "cpu", "ratio": "auto", **zero.pop("offload_optimizer", {})}
    placement = {"remeasure_after": 10}
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": optimizer, "offload_placement": placement, **zero},
    }
    found = [f.message for f in inspect(config).findings if f.severity is Severity.ERROR]
    (message,) = found
    assert "`zero_optimization.offload_placement.remeasure_after` is set, and" in message
    assert reason in message
