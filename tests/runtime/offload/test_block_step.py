"""A step in blocks gives every element the bits of the optimizer's own step on the whole range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dsrun.errors import ModelError
from dsrun.runtime.offload.block_step import RangeWork, block_step_for
from dsrun.runtime.optim.aliases import DeepSpeedCPUAdam
from dsrun.runtime.optim.lamb import Lamb
from dsrun.runtime.optim.lion import Lion

#: More than three blocks of 256, the last of them shorter; without a vector's tail.
NUMEL = 3 * 256 + 64
BLOCK = 256
STEPS = 3

FUSED: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda leaves: optim.AdamW(leaves, lr=1e-2, fused=True),
    "AdamW, amsgrad": lambda leaves: optim.AdamW(leaves, lr=1e-2, amsgrad=True, fused=True),
    "AdamW, maximize": lambda leaves: optim.AdamW(leaves, lr=1e-2, maximize=True, weight_decay=0.3, fused=True),
    "Adam": lambda leaves: optim.Adam(leaves, lr=1e-2, weight_decay=0.1, fused=True),
    "Adam, decoupled": lambda leaves: optim.Adam(
        leaves, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, fused=True
    ),
    "Adam, a tensor for rate": lambda leaves: optim.Adam(leaves, lr=torch.tensor(1e-2), fused=True),
    "CPUAdam": lambda leaves: DeepSpeedCPUAdam(leaves, lr=1e-2, weight_decay=0.1),
}
OWN: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW, for each": lambda leaves: optim.AdamW(leaves, lr=1e-2, foreach=False),
    "Adam, foreach": lambda leaves: optim.Adam(leaves, lr=1e-2, amsgrad=True, foreach=True),
    "SGD": lambda leaves: optim.SGD(leaves, lr=1e-2),
    "SGD, momentum": lambda leaves: optim.SGD(leaves, lr=1e-2, momentum=0.9, fused=True),
    "SGD, dampened": lambda leaves: optim.SGD(leaves, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "Adagrad": lambda leaves: optim.Adagrad(leaves, lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop": lambda leaves: optim.RMSprop(leaves, lr=1e-2, centered=True, momentum=0.5),
    "Adadelta": lambda leaves: optim.Adadelta(leaves, lr=1e-2),
    "Adamax": lambda leaves: optim.Adamax(leaves, lr=1e-2),
    "NAdam": lambda leaves: optim.NAdam(leaves, lr=1e-2),
    "RAdam": lambda leaves: optim.RAdam(leaves, lr=1e-2),
    "ASGD": lambda leaves: optim.ASGD(leaves, lr=1e-2),
    "Rprop": lambda leaves: optim.Rprop(leaves, lr=1e-2),
    "Lion": lambda leaves: Lion(leaves, lr=1e-2, weight_decay=0.1),
}


class Whole:
    """The optimizer on one leaf, stepped as the engine steps it: gradients scaled in place in fp32."""

    def __init__(self, make: Callable[[Any], optim.Optimizer]) -> None:
        self.leaf = nn.Parameter(values(0))
        self.optimizer = make([self.leaf])

    def step(self, grads: Tensor, scale: float) -> None:
        self.leaf.grad = grads.float().clone()
        if scale != 1:
            self.leaf.grad.mul_(scale)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.leaf]


class InBlocks:
    """The same range through `block_step_for`."""

    def __init__(self, make: Callable[[Any], optim.Optimizer]) -> None:
        self.master = values(0)
        leaf = nn.Parameter(self.master)
        self.optimizer = make([leaf])
        self.stepper = block_step_for(self.optimizer, block_numel=BLOCK)
        made = self.optimizer.state.get(leaf, {})
        self.states = {name: value for name, value in made.items() if value.shape == leaf.shape}
        self.scalars = {name: value for name, value in made.items() if name not in self.states}
        self.out = torch.full((NUMEL,), float("nan"), dtype=torch.bfloat16)

    def step(self, grads: Tensor, scale: float) -> None:
        options = self.optimizer.param_groups[0]
        self.stepper.step(RangeWork(self.master, grads, self.states, self.scalars, options, scale, self.out))

    @property
    def state(self) -> dict[str, Any]:
        return {**self.states, **self.scalars}


def values(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*FUSED, *OWN])
def test_bits_of_the_optimizer_on_the_whole_range(name: str, dtype: torch.dtype) -> None:
    make = {**FUSED, **OWN}[name]
    whole, ours = Whole(make), InBlocks(make)
    for step in range(STEPS):
        grads = values(step + 1).to(dtype)
        scale = 1.0 if step == 1 else 0.37
        given = grads.clone()
        whole.step(given, scale)
        ours.step(grads, scale)
        assert torch.equal(given, grads), "gradients are left as they are"
        assert torch.equal(ours.master, whole.leaf.detach())
        assert torch.equal(ours.out, ours.master.bfloat16())
    assert ours.state.keys() == whole.state.keys()
    for key, value in whole.state.items():
        assert torch.equal(torch.as_tensor(ours.state[key]), torch.as_tensor(value)), key


def test_an_optimizer_that_needs_whole_tensors_is_refused() -> None:
    with pytest.raises(ModelError, match="Lamb needs whole tensors"):
        block_step_for(Lamb([nn.Parameter(values(0))], lr=1e-2))
