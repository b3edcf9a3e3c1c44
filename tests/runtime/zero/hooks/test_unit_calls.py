"""Gradients of blocks whose backward goes through the CPU while others run on a GPU; on the CPU there is one queue."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.contract.environment import BACKEND_ENV
from dsrun.runtime.zero.access.fragments import safe_get_full_grad
from support.training import make_engine

WIDTH = 64
BLOCKS = 5


class SlowOnTheCpu(torch.autograd.Function):
    """Hands a tensor through; its backward computes for a millisecond or more, where nodes of the CPU run."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        work = torch.eye(192, dtype=torch.float64)
        for _ in range(4):
            work = work @ work
        return grads[0] * work[0, 0].to(grads[0].dtype)


class Detour(nn.Module):
    """A block with parameters whose gradients come by way of the CPU, and for which no gradient of its input waits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x_BD: Tensor) -> Tensor:
        # Behind the CPU's part, the backward of this product reads both parameters: at stage 3 from a slot.
        gain = SlowOnTheCpu.apply((self.gain * self.scale).cpu()).to(x_BD.device)
        return x_BD + torch.tanh(self.linear(x_BD)) * gain


class Detours(nn.Module):
    """Several such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Detour() for _ in range(BLOCKS))

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage},
    }


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1.3)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_come_by_way_of_the_cpu_are_plain_torchs(stage: int) -> None:
    torch.manual_seed(1)
    model = Detours()
    plain = copy.deepcopy(model)
    engine = make_engine(settings(stage), model=model)
    assert engine.device.type == "cuda"
    plain.to(engine.device)
    for number in range(30):
        x_BD = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(engine.device)
        plain.zero_grad()
        plain(x_BD).square().mean().backward()
        engine.backward(engine(x_BD).square().mean())
        for (name, param), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            found = safe_get_full_grad(param)
            assert found is not None
            assert expected.grad is not None
            torch.testing.assert_close(found, expected.grad, rtol=1e-5, atol=1e-7, msg=f"{name} in round {number}")
        engine.step()
    engine.destroy()


@pytest.mark.gpu_seconds(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_runs_in_the_thread_that_called_it_with_one_queue_for_all_devices(
    stage: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND_ENV, "gloo" if device.type == "cpu" else "nccl")
    engine = make_engine(settings(stage), model=Detours())
    assert engine.device.type == device.type
    seen: list[tuple[bool, int]] = []

    def look(grad: Tensor) -> None:
        seen.append((torch.autograd.is_multithreading_enabled(), threading.get_ident()))

    output = engine(torch.randn(8, WIDTH, device=engine.device))
    output.register_hook(look)
    engine.backward(output.square().mean())
    assert seen == [(False, threading.get_ident())]
    assert torch.autograd.is_multithreading_enabled(), "a script's own backwards are as it left them"
    engine.destroy()
