"""A step in blocks gives every element the bits of the optimizer's own step on the whole range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dsrun.errors import ModelError
from dsrun.runtime.offload.states.split_master import join_master, split_master
from dsrun.runtime.offload.step.ways import RangeWork, block_step_for
from dsrun.runtime.optim.algorithms.deepspeed_classes import DeepSpeedCPUAdam
from dsrun.runtime.optim.algorithms.lamb import Lamb
from dsrun.runtime.optim.algorithms.lion import Lion

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


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_states_lie_where_the_driver_has_room_for_them(name: str) -> None:
    make = {**FUSED, **OWN}[name]
    master = values(0)
    optimizer = make([nn.Parameter(master)])
    reserved: dict[str, Tensor] = {}

    def place(name: str, dtype: torch.dtype) -> Tensor:
        reserved[name] = torch.full((NUMEL,), float("nan"), dtype=dtype)
        return reserved[name]

    states: dict[str, Tensor] = {}
    work = RangeWork(master, values(1), states, {}, optimizer.param_groups[0], place=place)
    block_step_for(optimizer, block_numel=BLOCK).step(work)
    assert "exp_avg" in states
    assert all(states[key] is reserved[key] and not states[key].isnan().any() for key in states)


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_parameters_may_be_written_where_the_gradients_are(name: str) -> None:
    make = {**FUSED, **OWN}[name]
    apart, ours = InBlocks(make), InBlocks(make)
    for step in range(STEPS):
        grads = values(step + 1).bfloat16()
        apart.step(grads, 0.37)
        options = ours.optimizer.param_groups[0]
        ours.stepper.step(RangeWork(ours.master, grads, ours.states, ours.scalars, options, 0.37, grads))
        assert torch.equal(grads, apart.out)
        assert torch.equal(ours.master, apart.master)


def test_threads_do_not_change_bits_nor_what_the_caller_uses() -> None:
    make = FUSED["AdamW"]
    found: list[Tensor] = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        master = torch.randn(1 << 16, generator=torch.Generator().manual_seed(7))
        optimizer = make([nn.Parameter(master)])
        stepper = block_step_for(optimizer, block_numel=1 << 15, threads=threads)
        grads = torch.randn(1 << 16, generator=torch.Generator().manual_seed(8)).bfloat16()
        stepper.step(RangeWork(master, grads, {}, {}, optimizer.param_groups[0], 0.5))
        assert torch.get_num_threads() == before
        found.append(master)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_bf16_states_are_rounded_after_each_step_and_only_then() -> None:
    make = FUSED["AdamW, amsgrad"]
    ours, whole = InBlocks(make), Whole(make)
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        ours.states[name] = torch.zeros(NUMEL, dtype=torch.bfloat16)
    for step in range(STEPS):
        grads = values(step + 1).bfloat16()
        whole.step(grads, 0.37)
        ours.step(grads, 0.37)
        assert torch.equal(ours.master, whole.leaf.detach())
        for name, state in ours.states.items():
            assert state.dtype == torch.bfloat16
            whole.state[name].copy_(whole.state[name].bfloat16())
            assert torch.equal(state.float(), whole.state[name])


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_masters_of_16_bits_are_stepped_in_fp32_and_rounded(name: str) -> None:
    make = {**FUSED, **OWN}[name]
    whole, ours = Whole(make), InBlocks(make)
    master = values(0).bfloat16()
    for step in range(STEPS):
        grads = values(step + 1).bfloat16()
        with torch.no_grad():
            whole.leaf.copy_(whole.leaf.bfloat16())
        whole.step(grads, 0.37)
        options = ours.optimizer.param_groups[0]
        ours.stepper.step(RangeWork(master, grads, ours.states, ours.scalars, options, 0.37))
        assert torch.equal(master, whole.leaf.detach().bfloat16())
        assert all(state.dtype == torch.float32 for state in ours.states.values())


@pytest.mark.parametrize("name", ["AdamW", "Adam, foreach", "Lion"])
def test_a_split_master_gives_the_bits_of_a_whole_one(name: str) -> None:
    make = {**FUSED, **OWN}[name]
    whole, ours = Whole(make), InBlocks(make)
    halves = split_master(values(0))
    for step in range(STEPS):
        grads = values(step + 1).bfloat16()
        whole.step(grads, 0.37)
        options = ours.optimizer.param_groups[0]
        ours.stepper.step(RangeWork(halves, grads, ours.states, ours.scalars, options, 0.37))
        assert torch.equal(join_master(halves), whole.leaf.detach())
        assert torch.equal(halves.high_N, whole.leaf.detach().bfloat16())


def test_a_schedule_that_watches_the_optimizer_does_not_lead_blocks_to_it() -> None:
    leaf = nn.Parameter(values(0))
    optimizer = optim.AdamW([leaf], lr=1e-2, foreach=False)
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the script ran for a block"))
    master = values(0)
    block_step_for(optimizer, block_numel=BLOCK).step(RangeWork(master, values(1), {}, {}, optimizer.param_groups[0]))
    assert not torch.equal(master, leaf)
    assert not optimizer.state


class CountsInItsGroup(optim.Optimizer):
    """Counts steps as apex and timm do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / group["step"])


def test_options_that_the_optimizer_sets_are_given_to_the_driver() -> None:
    master, expected = values(0), values(0)
    optimizer = CountsInItsGroup([nn.Parameter(values(0))])
    stepper = block_step_for(optimizer, block_numel=BLOCK)
    options = dict(optimizer.param_groups[0])
    for step in range(1, STEPS + 1):
        work = RangeWork(master, values(step), {}, {}, options)
        stepper.step(work)
        assert work.changed == {"step": step}
        options |= work.changed
        expected.add_(values(step), alpha=-1.0 / step)
    assert torch.equal(master, expected)
    assert optimizer.param_groups[0]["step"] == 0


class CountsInItself(CountsInItsGroup):
    """Counts where all parameters share the count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        super().step()


class ByNorm(CountsInItsGroup):
    """Every leaf moves by a vector of one length."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad / param.grad.norm(), alpha=-group["lr"])


def replaced(params: Any) -> optim.Optimizer:
    optimizer = optim.SGD(params, lr=1e-2)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: Lamb(params, lr=1e-2), "Lamb knows which tensors its elements belong to"),
        (CountsInItself, "CountsInItself keeps `taken` for all parameters together"),
        (ByNorm, "ByNorm gives the halves of a vector other values than the whole"),
        (optim.LBFGS, r"LBFGS cannot step a vector of numbers: TypeError: .*closure"),
        (lambda params: optim.Adafactor(params), "Adafactor gives the halves of a vector other values"),
        (replaced, "SGD has had its `step` replaced on the object"),
    ],
)
def test_what_is_not_elementwise_is_refused_before_anything_is_stepped(make: Any, reason: str) -> None:
    leaf = nn.Parameter(values(0))
    optimizer = make([leaf])
    drawn = torch.random.get_rng_state()
    with pytest.raises(ModelError, match=reason):
        block_step_for(optimizer)
    assert torch.equal(leaf.detach(), values(0))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert getattr(optimizer, "taken", 0) == 0


def test_a_range_without_elements_is_left_alone() -> None:
    optimizer = FUSED["AdamW"]([nn.Parameter(values(0))])
    empty = torch.empty(0)
    block_step_for(optimizer).step(RangeWork(empty, empty, {}, {}, optimizer.param_groups[0]))
