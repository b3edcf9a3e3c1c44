"""Prints what a call of the engine as a module takes beside its `forward`, and beside a call of the model.

    python call.py ROUNDS          JSON: microseconds a call, a value each round

Whichever `deepspeed` is on the path is measured: one rank, stage 0, a model that does nothing with its input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

_CALLS = 1000


class Same(nn.Module):
    """Returns its input, and has a parameter, without which there is no engine."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return x


def _call_us(call: Callable[[Tensor], object], x: Tensor) -> float:
    began_s = time.perf_counter()
    for _ in range(_CALLS):
        call(x)
    return (time.perf_counter() - began_s) / _CALLS * 1e6


def main() -> None:
    """Measures and prints."""
    rounds = int(sys.argv[1])
    torch.set_num_threads(1)
    # DeepSpeed asks MPI for the ranks where there is no group.
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = Same()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={"train_batch_size": 1, "zero_optimization": {"stage": 0}}
    )
    engine.eval()
    calls: dict[str, Callable[[Tensor], object]] = {
        "engine(x)": engine,
        "engine.forward(x)": engine.forward,
        "model(x)": engine.module,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    x = torch.zeros(1)
    with torch.no_grad():
        for round_ in range(rounds + 1):
            for name, call in calls.items():
                took_us = _call_us(call, x)
                if round_:
                    found[name].append(took_us)
    # DeepSpeed talks on stdout too: this is the last line of it.
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
