"""A key of offload that nothing reads is told with its reason, and no two findings are about one refusal."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.findings import Code, Severity
from dsrun.config.load import inspect

Keys = dict[str, Any]


def findings(zero: Keys, **more: Any) -> list[tuple[Severity, str, str]]:
    """What is said of a config, but for its batch and differences from DeepSpeed."""
    config = {"train_batch_size": 2, "gradient_clipping": 1.0, "zero_optimization": zero, **more}
    found = inspect(config).findings
    return [(f.severity, f.key, f.message) for f in found if f.code in (Code.NO_EFFECT, Code.COMBINATION)]


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize(("device", "reason"), [("none", "stays on the GPU"), ("cpu", "lies in host memory")])
def test_a_folder_without_a_drive_does_nothing(name: str, device: str, reason: str) -> None:
    zero = {"stage": 3, name: {"device": device, "nvme_path": "/nvme"}}
    ((severity, key, message),) = findings(zero, bf16={"enabled": True})
    assert severity is Severity.WARNING
    assert key == f"zero_optimization.{name}.nvme_path"
    assert message.endswith(f"`device` beside it is {device}, so everything {reason}")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("offload_optimizer", {"buffer_count": 9, "fast_init": False, "pipeline_read": False, "pipeline_write": False}),
        ("offload_param", {"buffer_count": 9, "max_in_cpu": 7}),
    ],
)
def test_keys_of_drives_without_one_are_told_each(name: str, keys: Keys) -> None:
    more: Keys = {"bf16": {"enabled": True}}
    found = findings({"stage": 3, name: {"device": "cpu", **keys}}, **more)
    assert [key for _, key, _ in found] == [f"zero_optimization.{name}.{key}" for key in keys]
    assert {severity for severity, _, _ in found} == {Severity.WARNING}
    assert findings({"stage": 3, name: {"device": "nvme", "nvme_path": "/nvme", **keys}}, **more) == []
    assert findings({"stage": 3, name: {"device": "none", **keys}}, **more) == [], "a section that is off says nothing"


def test_a_value_that_is_the_default_asks_for_nothing() -> None:
    assert findings({"stage": 2, "offload_optimizer": {"device": "cpu", "buffer_count": 4, "fast_init": True}}) == []


def test_how_drives_are_read_matters_where_there_is_one() -> None:
    aio: Keys = {"block_size": 4096}
    ((severity, key, message),) = findings({"stage": 2, "offload_optimizer": {"device": "cpu"}}, aio=aio)
    assert (severity, key) == (Severity.WARNING, "aio")
    assert "nothing goes to a drive" in message
    assert findings({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}, aio=aio) == []
    inputs: Keys = {"policy": "every_block", "cpu_checkpointing": True, "nvme_path": "/a"}
    assert "aio" not in [key for _, key, _ in findings({"stage": 2}, aio=aio, activation_checkpointing=inputs)]


@pytest.mark.parametrize("paths", [["/a", "/a"], ["/a/", "/b", "/a"], ["/a/../b", "/b"]])
def test_a_folder_named_twice_is_refused(paths: list[str]) -> None:
    section: Keys = {"device": "nvme", "nvme_path": paths}
    ((severity, key, message),) = findings({"stage": 2, "offload_optimizer": section})
    assert (severity, key) == (Severity.ERROR, "zero_optimization.offload_optimizer.nvme_path")
    assert " twice; each rank would have two files there" in message


@pytest.mark.parametrize(("device", "place"), [("cpu", "host memory"), ("nvme", "the drive")])
def test_trained_parameters_that_stay_with_their_optimizer_are_told(device: str, place: str) -> None:
    section: Keys = {"device": device, **({"nvme_path": "/a"} if device == "nvme" else {})}
    ((severity, key, message),) = findings({"stage": 3, "offload_param": section})
    assert (severity, key) == (Severity.WARNING, "zero_optimization.offload_param.device")
    assert message.endswith(f"they stay there, and only frozen ones go to {place}")
    assert findings({"stage": 3, "offload_param": section}, bf16={"enabled": True}) == []


def test_what_is_refused_is_not_told_to_do_nothing_as_well() -> None:
    ((severity, key, message),) = findings({"stage": 0, "offload_optimizer": {"device": "cpu"}})
    assert (severity, key) == (Severity.ERROR, "zero_optimization.offload_optimizer.device")
    assert "every rank would step the whole model" in message
