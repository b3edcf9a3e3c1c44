"""Which keeper a section asks for, told by what it does with tensors, and all that is wrong with a section."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.errors import ConfigError
from dsrun.runtime.activation.keep.host_ring import IN_FLIGHT
from dsrun.runtime.activation.keep.keeper import AsItIs, Keeper
from dsrun.runtime.activation.keep.packing import packed_bytes
from dsrun.runtime.activation.keep.rings import Rings
from dsrun.runtime.activation.settings import OnItsDevice, check_section, keeper_of_inputs

NUMEL = 4096
SHAPE = (8, NUMEL // 8)


def keeper(**keys: Any) -> Keeper:
    section = ActivationCheckpointing.model_validate(keys)
    return keeper_of_inputs(section, None, rings=Rings(section, io=None, rank=0))


@pytest.mark.parametrize(
    ("keys", "device_bytes"),
    [
        ({}, 8 * NUMEL * 4),
        ({"cpu_checkpointing": True}, IN_FLIGHT * NUMEL * 4),
        ({"contiguous_memory_optimization": True, "number_checkpoints": 8}, 8 * NUMEL * 4),
        ({"packing": "int8"}, 8 * packed_bytes(NUMEL)),
    ],
)
def test_eight_inputs_are_kept_where_the_section_says(keys: dict[str, Any], device_bytes: int) -> None:
    kept = keeper(**keys)
    inputs = [torch.full(SHAPE, float(i)) for i in range(8)]
    tickets = [kept.put(tensor) for tensor in inputs]
    assert kept.device_bytes == device_bytes
    for _ in range(len(tickets)):
        assert torch.allclose(tickets.pop().take(), inputs.pop(), rtol=1e-6)
    assert kept.device_bytes == (device_bytes if "number_checkpoints" in keys else 0)  # a buffer stays for the next


def test_an_input_of_two_calls_is_kept_once_by_every_keeper() -> None:
    for keys in ({}, {"cpu_checkpointing": True}, {"packing": "int8", "cpu_checkpointing": True}):
        kept = keeper(**keys)
        tensor = torch.ones(SHAPE)
        assert kept.put(tensor) is not None
        first = kept.put(tensor)
        assert kept.put(tensor) is first


def test_each_device_has_a_keeper_of_its_own() -> None:
    made: list[torch.device] = []

    def make(device: torch.device) -> Keeper:
        made.append(device)
        return AsItIs()

    kept = OnItsDevice(make)
    tickets = [kept.put(torch.zeros(4, device=kind)) for kind in ("cpu", "meta", "cpu")]
    assert made == [torch.device("cpu"), torch.device("meta")]
    assert kept.device_bytes == 3 * 4 * 4
    del tickets
    assert kept.device_bytes == 0


def test_all_that_does_not_go_together_is_told_at_once() -> None:
    section = ActivationCheckpointing(partition_activations=True, contiguous_memory_optimization=True)
    with pytest.raises(ConfigError, match=r"configure: .*partition_activations` is true without") as refused:
        check_section(section, tensor_parallel=False, source="configure")
    assert [problem.message.split("`")[1] for problem in refused.value.problems] == [
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.contiguous_memory_optimization",
    ]
    whole = section.model_copy(update={"number_checkpoints": 4})
    check_section(whole, tensor_parallel=True, source="configure")
