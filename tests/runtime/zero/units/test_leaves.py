"""Ranks that use other parts of a model at stage 3, where what chooses between them is a leaf module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.zero.units.find import find_units
from support.inside_engine import store_of
from support.ranks import run_ranks
from support.training import accumulated_gradients, make_engine

WIDTH = 65


class Expert(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(x).tanh()


class Router(nn.Module):
    """Another expert on each rank, and two of them in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.experts[(_rank() + 2 * self.calls) % 4](x)


class Routed(nn.Module):
    """Routers outside of a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Router(), Router()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.inp(x))))


class Skipping(nn.Module):
    """Other blocks are left out on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            if index != 2 * _rank():
                x = block(x)
        return x


def _rank() -> int:
    return dist.get_rank()


def _train(kind: str, leaf_module: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Gradients of three steps at stages 2 and 3."""
    found: list[dict[str, Tensor]] = []
    for stage in (2, 3):
        torch.manual_seed(3)
        settings = {
            "train_micro_batch_size_per_gpu": 3,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "leaf_module": leaf_module},
        }
        engine = make_engine(settings, model=Routed() if kind == "routed" else Skipping())
        if stage == 3:
            store_of(engine).poison = True
        for step in range(3):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
            engine.backward(engine(x).square().mean())
            found.append(accumulated_gradients(engine))
            engine.step()
    return found


@pytest.mark.parametrize(
    ("kind", "leaf_module"),
    [
        ("routed", {"classes": ["Router"]}),
        ("routed", {"name_suffixes": ["st", "second"]}),
        ("skips", {"names": ["blocks"]}),
    ],
)
def test_ranks_use_other_experts_at_stage_3_with_the_gradients_of_stage_2(
    kind: str, leaf_module: dict[str, Any]
) -> None:
    for found in run_ranks(2, _train, kind, leaf_module):
        for at_2, at_3 in zip(found[:3], found[3:], strict=True):
            assert at_2.keys() == at_3.keys()
            for name, value in at_2.items():
                assert torch.equal(at_3[name], value), name
    assert any(value.any() for name, value in found[0].items() if ".2." in name)


def test_leaf_modules_are_units_and_uncalled_containers_go_to_the_rest() -> None:
    model = Routed()
    assert [unit.name for unit in find_units(model)] == [
        "inp",
        *(f"{router}.experts.{index}" for router in ("first", "second") for index in range(4)),
        "out",
    ]
    assert dsrun.zero.set_leaf_modules(model, [Router]) == [model.first, model.second]
    assert [unit.name for unit in find_units(model)] == ["inp", "first", "second", "out"]
    model = Routed()
    dsrun.zero.set_leaf_modules(model, ["ModuleList"])
    assert [unit.name for unit in find_units(model)] == ["inp", "out", "rest"]


def test_a_class_that_the_model_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(ModelError, match="no module of class Mixtral") as caught:
        dsrun.zero.set_leaf_modules(Routed(), ["Mixtral"])
    assert "Router" in (caught.value.hint or "")
