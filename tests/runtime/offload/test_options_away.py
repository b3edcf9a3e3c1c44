"""A step taken away from the optimizer starts from the options that its own code would have found."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.offload.step.ways import RangeWork, block_step_for
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.protocols import OwnedRange


class CountsInItsGroup(optim.Optimizer):
    """Counts steps as apex and timm do, whether or not there are gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["step"])


def away() -> tuple[ShardOptimizer, CountsInItsGroup]:
    layout = lay_out("unit", [("a", (256,))], world_size=1)
    owned = OwnedRange(layout, 0, torch.zeros(256), torch.zeros(256), (0,))
    shards = ShardOptimizer([owned], group_count=1)
    optimizer = CountsInItsGroup(shards.shards_by_group()[0])
    shards.drive(optimizer)
    return shards, optimizer


def test_a_count_in_the_group_goes_up_once_a_step() -> None:
    shards, optimizer = away()
    stepper = block_step_for(optimizer)
    master = nn.Parameter(torch.zeros(256)).detach()
    for step in (1, 2, 3):
        (options,) = shards.begin_away()
        assert options["step"] == step - 1
        work = RangeWork(master, torch.ones(256), {}, {}, options)
        stepper.step(work)
        shards.end_away({0: work.changed})
        assert optimizer.param_groups[0]["step"] == step
    assert torch.equal(master, torch.zeros(256).sub(1.0).sub(1 / 2).add(torch.ones(256), alpha=-1 / 3))


def test_what_hooks_set_before_the_step_counts() -> None:
    shards, optimizer = away()
    optimizer.register_step_pre_hook(lambda opt, *_: opt.param_groups[0].update(lr=0.25))
    assert shards.begin_away()[0]["lr"] == 0.25
    assert shards.begin_away()[0]["step"] == 1
