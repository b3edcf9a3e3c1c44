"""A drive needs a folder on it, and masters a place of their own."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.findings import Code, Severity
from dsrun.config.load import inspect


def errors_of(config: dict[str, Any]) -> list[str]:
    found = inspect(config).findings
    return [f.message for f in found if f.severity is Severity.ERROR and f.code is Code.COMBINATION]


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize("path", [{}, {"nvme_path": None}, {"nvme_path": ""}, {"nvme_path": []}])
def test_a_drive_without_a_folder_is_refused(name: str, path: dict[str, Any]) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, name: {"device": "nvme", **path}}}
    (message,) = errors_of(config)
    assert message.endswith(
        f'`zero_optimization.{name}.device` is "nvme", and `nvme_path` beside it is not set; '
        "expected a folder on a local drive"
    )


@pytest.mark.parametrize("path", ["/nvme", ["/a", "/b"]])
def test_one_folder_or_several_will_do(path: Any) -> None:
    section = {"device": "nvme", "nvme_path": path}
    zero = {"stage": 3, "offload_optimizer": section, "offload_param": section}
    assert errors_of({"bf16": {"enabled": True}, "zero_optimization": zero}) == []
    assert errors_of({"zero_optimization": zero}) == []


def test_parameters_on_a_drive_are_no_masters_in_host_memory() -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
    }
    (message,) = errors_of({"zero_optimization": zero})
    assert 'is "nvme" in fp32 training with the optimizer in host memory' in message
    assert errors_of({"zero_optimization": zero, "bf16": {"enabled": True}}) == []


def test_a_step_that_may_not_count_is_not_written_to_a_drive() -> None:
    section = {"device": "nvme", "nvme_path": "/nvme", "super_offload": True}
    (message,) = errors_of({"zero_optimization": {"stage": 2, "offload_optimizer": section}})
    assert '`zero_optimization.offload_optimizer.super_offload` is true and `device` beside it is "nvme"' in message
    assert errors_of({"zero_optimization": {"stage": 2, "offload_optimizer": {**section, "device": "cpu"}}}) == []
