"""Reads of a unit's parameters by name are seen while its forward does not run, and lists of parameters are not."""

from __future__ import annotations

import copy
import pickle
import weakref

import torch
from torch import Tensor, nn

from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.zero.hooks.outside import OutsideRead, ReadsOutside, handed_out
from dsrun.runtime.zero.units.find import UnitSpec
from dsrun.runtime.zero.units.unit import ParamUnit


def watched() -> tuple[nn.Sequential, ReadsOutside, list[int]]:
    """A unit of one layer's weights, beside a bias that is none of its own; and what was read of it, by position."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    owned = [(name, param) for name, param in module.named_parameters() if name != "1.bias"]
    asked: list[int] = []

    def read(position: int) -> Tensor:
        asked.append(position)
        return torch.full((), float(position))

    unit = ParamUnit(UnitSpec("block", module, tuple(owned)), AloneCollectives(), index=0)
    return module, ReadsOutside(unit, read), asked


def test_reads_by_name_are_seen_and_lists_of_parameters_are_not() -> None:
    module, _, asked = watched()
    assert float(module[1].weight) == 2.0
    assert float(module[0].bias) == 1.0
    assert isinstance(module[1].bias, nn.Parameter), "of another unit"
    assert asked == [2, 1]
    assert [type(param) for param in module.parameters()] == [nn.Parameter] * 4
    assert module.state_dict().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert asked == [2, 1]


def test_nothing_is_seen_while_the_unit_runs() -> None:
    module, reads, asked = watched()
    reads.let_through()
    assert module[0].weight.shape == (3, 2)
    assert type(module[0].__dict__["_parameters"]) is dict, "what a compiler shall see"
    reads.watch()
    assert module[0].weight.shape == ()
    assert asked == [0]


def test_a_parameter_set_or_deleted_meanwhile_is_so_in_the_forward_too() -> None:
    module, reads, _ = watched()
    module[0].extra = nn.Parameter(torch.ones(1))
    del module[0].bias
    reads.let_through()
    assert [name for name, _ in module[0].named_parameters()] == ["weight", "extra"]


def test_copies_of_a_model_are_not_watched() -> None:
    module, _, asked = watched()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin[0].weight.shape == (3, 2)
    assert asked == []


def test_a_reading_lives_as_long_as_a_gradient_may_come_of_it() -> None:
    param = nn.Parameter(torch.tensor([2.0, 3.0]))
    order: list[Tensor | None] = []
    readings: weakref.WeakSet[OutsideRead] = weakref.WeakSet()

    def hand_out() -> Tensor:
        reading = OutsideRead(lambda: torch.tensor([5.0, 7.0]), lambda: order.append(param.grad))
        readings.add(reading)
        return handed_out(param, reading)

    assert hand_out().dtype == torch.float32
    assert not readings, "the result is gone"
    loss = hand_out().square().sum()
    assert len(readings) == 1
    loss.backward()
    assert order == [None], "told before the gradient came"
    assert param.grad is not None
    assert param.grad.tolist() == [10.0, 14.0]
    del loss
    assert not readings
