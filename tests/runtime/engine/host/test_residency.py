"""What stays on the device by `ratio` "auto" goes by all the memory that this process may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsrun.config.load import load
from dsrun.runtime.engine.host.residency import ResidencyPolicy
from dsrun.runtime.memory.bus import bus_for
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.precision.policy import BF16


def staying_on(device: torch.device, **placement: Any) -> ResidencyPolicy:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": "auto"}, "offload_placement": placement}
    settings = load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, world_size=1)
    mesh: Any = SimpleNamespace(device=device)
    pool = HostPool(None, say=print)
    return ResidencyPolicy(
        nn.Linear(2, 2),
        settings,
        mesh,
        precision=BF16,
        states=2,
        bus=bus_for(device),
        pool=pool,
        chunk_of=lambda units: None,
        say=print,
    )


def test_a_budget_is_what_it_says_and_a_cpu_has_none() -> None:
    cpu = torch.device("cpu")
    assert staying_on(cpu, device_memory=1 << 30)._device_bytes() == 1 << 30
    assert staying_on(cpu)._device_bytes() is None


@pytest.mark.cuda
def test_what_torch_has_cached_of_a_model_built_on_the_gpu_is_room() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    staying = staying_on(device, activation_share=0.0)
    torch.cuda.empty_cache()
    before = staying._device_bytes()
    cached = torch.zeros(2 << 30, dtype=torch.uint8, device=device)
    used = staying._device_bytes()
    del cached
    after = staying._device_bytes()
    assert before is not None
    assert used is not None
    assert after is not None
    assert before - used >= 2 << 30
    assert abs(after - before) < 64 << 20
    torch.cuda.empty_cache()
