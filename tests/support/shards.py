"""Optimizers over shards without an engine: a few units, cut for any number of ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.mesh.collectives import Traffic
from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.protocols import SOLE_HOLDER, OwnedRange, StateEntry
from support.entries import all_of

#: Two blocks and the ends of a model: sizes that no vector width divides, a batch of matrices, none at all.
UNITS: list[list[tuple[str, tuple[int, ...]]]] = [
    [("embed.weight", (31, 24))],
    [("blocks.0.q_proj.weight", (24, 24)), ("blocks.0.up.weight", (73, 24)), ("blocks.0.up.bias", (73,))],
    [("blocks.1.q_proj.weight", (24, 24)), ("blocks.1.down.weight", (24, 73)), ("blocks.1.conv.weight", (4, 6, 3, 5))],
    [("norm.weight", (24,)), ("nothing", (0, 3)), ("gain", ()), ("head.weight", (31, 24))],
]
Make = Callable[[Any], optim.Optimizer]
Values = dict[str, Tensor]


def random_values(seed: int, units: list[list[tuple[str, tuple[int, ...]]]] = UNITS) -> Values:
    """Values or gradients of every tensor, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    names = [item for unit in units for item in unit]
    return {name: torch.randn(shape, generator=generator) * 4.0 ** -(i % 5) for i, (name, shape) in enumerate(names)}


@dataclass(slots=True)
class Trained:
    """What came of a run: values of all tensors, state entries of every rank, collectives of rank 0."""

    values: Values
    entries: list[list[StateEntry]]
    traffic: Traffic
    options: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def train_shards(
    make: Make,
    *,
    world_size: int,
    sharded: bool = True,
    steps: range = range(3),
    start: Values | None = None,
    saved: Trained | None = None,
    units: list[list[tuple[str, tuple[int, ...]]]] = UNITS,
) -> Trained:
    """Takes steps on every rank, with the gradients of `random_values`.

    Args:
        make: function that makes the optimizer from a list of parameter group dicts.
        world_size: ranks.
        sharded: each rank owns a slice; else everything.
        steps: numbers of the steps, which decide the gradients.
        start: first values.
        saved: a run to go on from: its states are loaded first.
        units: names and shapes of each unit's tensors.
    """
    first = random_values(0, units) if start is None else start
    world = LoopbackWorld(world_size)
    layouts = [lay_out(f"unit {i}", unit, world_size=world_size) for i, unit in enumerate(units)]
    masters = [[torch.zeros(layout.padded_numel) for layout in layouts] for _ in range(world_size)]
    traffic: list[Traffic] = []

    def fill(flats: list[Tensor], values: Values) -> None:
        for layout, flat in zip(layouts, flats, strict=True):
            for extent in layout.extents:
                flat[extent.offset : extent.offset + extent.numel] = values[extent.name].reshape(-1)

    def body(axis: Any) -> tuple[list[StateEntry], list[dict[str, Any]]]:
        own = masters[axis.rank]
        fill(own, first)
        grads = [torch.zeros_like(flat) for flat in own]
        ranges: list[OwnedRange] = []
        for layout, flat, grad in zip(layouts, own, grads, strict=True):
            low, high = layout.shard_range(axis.rank) if sharded else (0, layout.padded_numel)
            groups = tuple(0 for _ in layout.extents)
            ranks = all_of(world_size, axis.rank)
            holders = SOLE_HOLDER if sharded else ranks
            ranges.append(OwnedRange(layout, low, flat[low:high], grad[low:high], groups, holders=holders, ranks=ranks))
        shards = ShardOptimizer(ranges, group_count=1, axis=axis if sharded else None)
        shards.drive(make([{"params": params} for params in shards.shards_by_group()]))
        if saved is not None:
            load(shards, saved)
        for step in steps:
            fill(grads, random_values(step + 1, units))
            shards.step()
        if axis.rank == 0:
            traffic.append(axis.traffic)
        return shards.saved.state_entries(), shards.saved.options()

    found = world.run(body)
    values: Values = {}
    for i, layout in enumerate(layouts):
        whole = masters[0][i].clone()
        for rank in range(world_size if sharded else 1):
            low, high = layout.shard_range(rank) if sharded else (0, layout.padded_numel)
            whole[low:high] = masters[rank][i][low:high]
        filled = torch.zeros_like(whole, dtype=torch.bool)
        for extent in layout.extents:
            part = slice(extent.offset, extent.offset + extent.numel)
            values[extent.name] = whole[part].view(extent.shape)
            filled[part] = True
        assert not bool(whole[~filled].any()), "gaps and padding stay zero"
    return Trained(values, [entries for entries, _ in found], traffic[0], found[0][1])


def load(shards: ShardOptimizer, saved: Trained) -> None:
    """Does what loading a checkpoint does: pieces into whole tensors, and out of them into other pieces."""
    stored: dict[tuple[str, str], Tensor] = {}
    for entry in (entry for rank in saved.entries for entry in rank):
        whole = stored.setdefault((entry.name, entry.role), torch.zeros(entry.shape, dtype=entry.tensor.dtype).view(-1))
        whole[entry.start : entry.stop] = entry.tensor
    roles = sorted({role for _, role in stored})
    for name, role in shards.saved.wanted_states(roles):
        assert (name, role) in stored, f"no {role} of {name}"
    for entry in shards.saved.loadable_entries(roles):
        entry.tensor.copy_(stored[entry.name, entry.role][entry.start : entry.stop])
    shards.saved.set_options(saved.options)


def train_whole(
    make: Make, *, steps: range = range(3), units: list[list[tuple[str, tuple[int, ...]]]] = UNITS
) -> Values:
    """Takes the same steps on plain tensors, without shards."""
    params = {name: nn.Parameter(value) for name, value in random_values(0, units).items()}
    optimizer = make([{"params": list(params.items())}])
    for step in steps:
        for name, grad in random_values(step + 1, units).items():
            params[name].grad = grad
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


def assert_same(found: Values, expected: Values) -> None:
    """Every bit."""
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_near(found: Values, expected: Values, *, tolerance: float = 1e-6) -> None:
    """To rounding."""
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
