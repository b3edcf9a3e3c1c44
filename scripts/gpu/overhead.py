"""What dsrun adds to a block on the host and in kernels: 24 blocks so small that nothing else takes time.

`python -m gpu.overhead cuda 40`, so many rounds: microseconds a block of forward and backward at each stage minus those
of the plain model, and kernel launches a step. One JSON line on stdout.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import dsrun

_BLOCKS, _WIDTH, _WARM_UP = 24, 16, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(torch.relu(self.up(x_BD)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD.sum()


def main() -> None:
    device, rounds = sys.argv[1], int(sys.argv[2])
    x_BD = torch.randn(4, _WIDTH, device=device)
    plain = Stack().to(device)

    def run_plain() -> None:
        plain(x_BD).backward()

    calls: dict[str, Callable[[], None]] = {"plain": run_plain}
    for stage in (0, 1, 2, 3):
        config = {
            # Never reached: forward and backward alone are timed.
            "gradient_accumulation_steps": 1_000_000,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        engine, *_ = dsrun.initialize(model=Stack(), config=config)

        def run(engine: dsrun.Engine = engine) -> None:
            engine.backward(engine(x_BD))

        calls[f"stage {stage}"] = run
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(_WARM_UP + rounds):
        for name, call in calls.items():
            _wait(device)
            started = time.perf_counter()
            call()
            _wait(device)
            if round_ >= _WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    floor = statistics.median(seconds["plain"])
    result: dict[str, Any] = {
        name: {
            "us a block over plain": (statistics.median(values) - floor) / _BLOCKS * 1e6,
            "least": (min(values) - min(seconds["plain"])) / _BLOCKS * 1e6,
        }
        for name, values in seconds.items()
        if name != "plain"
    }
    if device == "cuda":
        for name, call in calls.items():
            result.setdefault(name, {})["kernel launches"] = _launches(call)
    print(json.dumps(result))


def _launches(call: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(
        event.count for event in seen.key_averages() if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
    )


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
