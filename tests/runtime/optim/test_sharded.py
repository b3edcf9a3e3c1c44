"""On flat shards an elementwise optimizer gives each element the bits it gives it in the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.optim.algorithms.lion import Lion
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.protocols import OwnedRange

#: Without a vector's tail, where torch's kernels round otherwise. One has no elements.
SHAPES = [("a", (16, 64)), ("b", (0, 8)), ("c", (48,)), ("d", (32, 33)), ("e", (1008,))]
GROUPS = (0, 0, 0, 1, 1)
OPTIONS: list[dict[str, Any]] = [{"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 3e-3}]
MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=1e-2, fused=True),
    "Adam": lambda groups: optim.Adam(groups, lr=1e-2, fused=True),
    "SGD": lambda groups: optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True),
    "plain SGD": lambda groups: optim.SGD(groups, lr=1e-2),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=1e-2),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=1e-2),
    "fused Adagrad": lambda groups: optim.Adagrad(groups, lr=1e-2, fused=True),
    "Lion": lambda groups: Lion(groups, lr=1e-2),
    "AdamW, for each": lambda groups: optim.AdamW(groups, lr=1e-2, foreach=False),
    "Adam, amsgrad": lambda groups: optim.Adam(groups, lr=1e-2, amsgrad=True, foreach=True),
    "SGD, dampened": lambda groups: optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.3, foreach=False),
    "RMSprop, centered": lambda groups: optim.RMSprop(groups, lr=1e-2, centered=True, momentum=0.5),
    "Adadelta": lambda groups: optim.Adadelta(groups, lr=1e-2),
    "Adamax": lambda groups: optim.Adamax(groups, lr=1e-2),
    "NAdam": lambda groups: optim.NAdam(groups, lr=1e-2),
    "RAdam": lambda groups: optim.RAdam(groups, lr=1e-2),
    "ASGD": lambda groups: optim.ASGD(groups, lr=1e-2),
    "Rprop": lambda groups: optim.Rprop(groups, lr=1e-2),
}


class Shards:
    """The shards of `world_size` ranks, with an optimizer each."""

    def __init__(
        self,
        world_size: int,
        make: Callable[[Any], optim.Optimizer],
        values: dict[str, Tensor],
        *,
        housed: bool = True,
    ) -> None:
        self.layout = lay_out("unit", SHAPES, world_size=world_size)
        self.master = torch.zeros(self.layout.padded_numel)
        self.grad = torch.zeros(self.layout.padded_numel)
        self._copy(self.master, values)
        self.optimizers: list[ShardOptimizer] = []
        self.memory: list[Arenas] = []
        for rank in range(world_size):
            start, stop = self.layout.shard_range(rank)
            owned = OwnedRange(self.layout, start, self.master[start:stop], self.grad[start:stop], GROUPS)
            shards = ShardOptimizer([owned], group_count=2)
            groups = [{"params": p, **o} for p, o in zip(shards.shards_by_group(), OPTIONS, strict=True)]
            shards.drive(make(groups))
            self.memory.append(Arenas())
            if housed:
                shards.house_states(self.memory[-1])
            self.optimizers.append(shards)

    def step(self, grads: dict[str, Tensor]) -> None:
        self._copy(self.grad, grads)
        for optimizer in self.optimizers:
            optimizer.step()

    def values(self) -> dict[str, Tensor]:
        return {e.name: self.master[e.offset : e.offset + e.numel].view(e.shape) for e in self.layout.extents}

    def _copy(self, flat: Tensor, values: dict[str, Tensor]) -> None:
        for extent in self.layout.extents:
            flat[extent.offset : extent.offset + extent.numel] = values[extent.name].view(-1)


def random_values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}


def whole_tensors(make: Callable[[Any], optim.Optimizer], steps: int) -> dict[str, Tensor]:
    params = {name: nn.Parameter(value) for name, value in random_values(0).items()}
    groups = [
        {"params": [params[name] for (name, _), g in zip(SHAPES, GROUPS, strict=True) if g == group], **options}
        for group, options in enumerate(OPTIONS)
    ]
    optimizer = make(groups)
    for step in range(steps):
        for name, grad in random_values(step + 1).items():
            params[name].grad = grad
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("name", MAKERS)
def test_shards_equal_whole_tensors_bit_for_bit(name: str, world_size: int) -> None:
    expected = whole_tensors(MAKERS[name], 4)
    shards = Shards(world_size, MAKERS[name], random_values(0))
    for step in range(4):
        shards.step(random_values(step + 1))
    for key, value in expected.items():
        assert torch.equal(shards.values()[key], value), key


@pytest.mark.parametrize("name", ["AdamW", "SGD", "plain SGD", "Adagrad"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 7)])
def test_state_moves_to_another_number_of_ranks(name: str, before: int, after: int) -> None:
    source = Shards(before, MAKERS[name], random_values(0))
    for step in range(2):
        source.step(random_values(step + 1))
    stored: dict[tuple[str, str], Tensor] = {}
    for optimizer in source.optimizers:
        for entry in optimizer.saved.state_entries():
            whole = stored.setdefault((entry.name, entry.role), torch.full((max(1, *entry.shape, 2000),), torch.nan))
            whole[entry.start : entry.stop] = entry.tensor
    target = Shards(after, MAKERS[name], source.values())
    roles = sorted({role for _, role in stored})
    for optimizer in target.optimizers:
        for entry in optimizer.saved.loadable_entries(roles):
            entry.tensor.copy_(stored[entry.name, entry.role][entry.start : entry.stop])
    for step in range(2, 4):
        grads = random_values(step + 1)
        source.step(grads)
        target.step(grads)
    for key, value in source.values().items():
        assert torch.equal(target.values()[key], value), key


def test_options_go_through_json_and_keep_their_types() -> None:
    shards = Shards(1, MAKERS["AdamW"], random_values(0)).optimizers[0]
    options = shards.saved.options()
    assert [group["weight_decay"] for group in options] == [0.1, 0.0]
    assert shards.torch_optimizer is not None
    shards.saved.set_options([{**group, "betas": [0.5, 0.6], "lr": 7.0, "unknown": 1} for group in options])
    for group in shards.torch_optimizer.param_groups:
        assert (group["betas"], group["lr"]) == ((0.5, 0.6), 7.0)
        assert "unknown" not in group


def test_gradients_come_back_after_the_scripts_own_zero_grad() -> None:
    shards = Shards(1, MAKERS["SGD"], random_values(0))
    optimizer = shards.optimizers[0]
    assert optimizer.torch_optimizer is not None
    optimizer.torch_optimizer.zero_grad(set_to_none=True)
    before = shards.master.clone()
    shards.step(random_values(1))
    assert not torch.equal(shards.master, before)


def test_gaps_stay_zero() -> None:
    shards = Shards(3, MAKERS["AdamW"], random_values(0))
    for step in range(3):
        shards.step(random_values(step + 1))
    filled = torch.zeros(shards.layout.padded_numel, dtype=torch.bool)
    for extent in shards.layout.extents:
        filled[extent.offset : extent.offset + extent.numel] = True
    assert not bool(shards.master[~filled].any())


def _states(shards: Shards) -> dict[tuple[int, str, str, int], Tensor]:
    return {
        (rank, entry.name, entry.role, entry.start): entry.tensor.clone()
        for rank, optimizer in enumerate(shards.optimizers)
        for entry in optimizer.saved.state_entries()
    }


@pytest.mark.parametrize("name", MAKERS)
def test_states_in_the_arena_are_those_that_torch_makes_elsewhere_bit_for_bit(name: str) -> None:
    housed, free = (Shards(3, MAKERS[name], random_values(0), housed=value) for value in (True, False))
    for step in range(3):
        for shards in (housed, free):
            shards.step(random_values(step + 1))
        ours, torchs = _states(housed), _states(free)
        assert ours.keys() == torchs.keys()
        for key, value in torchs.items():
            assert ours[key].dtype == value.dtype
            assert torch.equal(ours[key], value), (step, key)
        assert torch.equal(housed.master, free.master)


@pytest.mark.parametrize(("name", "states"), [("AdamW", 2), ("SGD", 1), ("Adam, amsgrad", 3), ("RMSprop, centered", 3)])
def test_states_take_what_the_layout_says_before_they_exist_and_stay_there(name: str, states: int) -> None:
    shards = Shards(3, MAKERS[name], random_values(0))
    expected = shards.layout.shard_numel * states * 4
    for step in range(3):
        for memory in shards.memory:
            (use,) = memory.report().arenas
            assert (use.name, use.reserved_bytes, use.used_bytes) == ("optimizer states", expected, expected)
        shards.step(random_values(step + 1))
        for optimizer, memory in zip(shards.optimizers, shards.memory, strict=True):
            assert all(memory.holds(state) for state in optimizer.tensors() if state.ndim)


def test_loaded_states_take_the_places_of_those_before_them() -> None:
    shards = Shards(1, MAKERS["AdamW"], random_values(0))
    optimizer, memory = shards.optimizers[0], shards.memory[0]
    shards.step(random_values(1))
    for roles in (["exp_avg", "exp_avg_sq", "scalar:step"], ["first", "second", "third"]):
        entries = [e for e in optimizer.saved.loadable_entries(roles) if not e.role.startswith("scalar:")]
        assert not any(bool(entry.tensor.any()) for entry in entries)
        outside = {entry.role for entry in entries if not memory.holds(entry.tensor)}
        assert outside == ({"third"} if "third" in roles else set()), "no more than were expected"


class Coupled(optim.SGD):
    """Counts its steps, as an optimizer nobody here knows may."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_checkpoint_without_states_has_the_next_step_make_them_in_their_places(name: str, steps_before: int) -> None:
    """As of a run that was saved before its first step."""
    shards = Shards(1, MAKERS[name], random_values(0))
    optimizer, memory = shards.optimizers[0], shards.memory[0]
    for step in range(steps_before):
        shards.step(random_values(step + 2))
    assert optimizer.saved.loadable_entries([]) == []
    for param_name, values in shards.values().items():
        values.copy_(random_values(0)[param_name])
    shards.step(random_values(1))
    states = [state for state in optimizer.tensors() if state.ndim]
    assert states
    assert all(memory.holds(state) for state in states)
    for key, value in whole_tensors(MAKERS[name], 1).items():
        assert torch.equal(shards.values()[key], value), key


def test_an_unknown_optimizer_steps_once_and_keeps_its_states() -> None:
    shards = Shards(1, lambda groups: Coupled(groups, lr=1e-2, momentum=0.9), random_values(0))
    shards.step(random_values(1))
    assert isinstance(shards.optimizers[0].torch_optimizer, Coupled)
    assert shards.optimizers[0].torch_optimizer.steps == 1
    assert not shards.memory[0].report().arenas
    assert shards.optimizers[0].tensors()


def test_gradients_are_there_after_the_first_step() -> None:
    shards = Shards(1, MAKERS["AdamW"], random_values(0))
    shards.step(random_values(1))
    for group in shards.optimizers[0].shards_by_group():
        assert all(param.grad is not None and bool(param.grad.any()) for param in group)
