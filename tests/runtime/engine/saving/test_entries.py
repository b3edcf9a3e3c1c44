"""A unit's pieces of parameters: of the whole tensors' boxes, with who holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dsrun.checkpoint_files.index.region import uncut
from dsrun.checkpoint_files.index.value import Index, StoredTensor
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.load import check_fit
from dsrun.runtime.engine.saving.entries import parameter_entries, unit_entries, wanted_tensors, whole_shapes
from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.protocols import SOLE_HOLDER, Holders
from dsrun.runtime.zero.units.find import UnitSpec
from dsrun.runtime.zero.units.unit import ParamUnit
from support.entries import all_of, column, row
from support.inside_engine import sharded_of, shards_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, make_engine, train

PART = column((6, 4), 1, 2)


def rank_of_two(rank: int) -> LoopbackCollectives:
    return LoopbackCollectives(LoopbackWorld(2), rank)


def cut_unit(model: nn.Linear) -> ParamUnit:
    """A unit of a layer of which this rank has the second half of the rows."""
    unit = ParamUnit(UnitSpec("rest", None, tuple(model.named_parameters())), rank_of_two(0), index=0)
    shapes = [(name, param.shape) for name, param in model.named_parameters()]
    unit.layout = lay_out("rest", shapes, world_size=2, cut={"weight": PART, "bias": column((6,), 1, 2)})
    unit.master = torch.arange(float(unit.layout.padded_numel))
    return unit


@pytest.mark.parametrize("stage", [0, 1])
def test_pieces_are_of_the_whole_tensors_boxes_and_know_their_holders(stage: int) -> None:
    unit = cut_unit(nn.Linear(4, 3))
    unit.owned = (0, unit.layout.shard_numel if stage else unit.layout.padded_numel)
    entries = unit_entries(unit, unit.master)
    assert [(entry.name, entry.whole, entry.start, entry.stop) for entry in entries] == [
        ("weight", PART, 0, 12),
        ("bias", column((6,), 1, 2), 0, 3),
    ]
    assert {entry.holders for entry in entries} == {SOLE_HOLDER if stage else all_of(2)}


def test_a_tensor_without_elements_is_held_by_all_ranks_of_its_unit() -> None:
    unit = ParamUnit(UnitSpec("rest", None, (("none", nn.Parameter(torch.empty(0, 3))),)), rank_of_two(1), index=0)
    (entry,) = unit_entries(unit, unit.master)
    assert (entry.name, entry.shape, entry.holders) == ("none", (0, 3), all_of(2, 1))


def test_a_rank_that_has_nothing_of_a_tensor_has_no_piece_of_it() -> None:
    unit = ParamUnit(UnitSpec("rest", None, (("w", nn.Parameter(torch.empty(4, 0))),)), rank_of_two(0), index=0)
    part = row((4, 1), 0, 2)
    unit.layout = lay_out("rest", [("w", (4, 0))], world_size=1, cut={"w": type(part)((4, 1), ())})
    assert unit_entries(unit, unit.master) == []


def test_buffers_and_whole_frozen_parameters_are_held_by_everyone() -> None:
    model = nn.BatchNorm1d(3)
    model.weight.requires_grad_(False)
    model.bias.requires_grad_(False)
    everyone = Holders(("data",), 2, 4)
    entries = parameter_entries(model, [], everyone=everyone)
    assert {entry.name for entry in entries} > {"weight", "bias", "running_mean"}
    assert all((entry.holders, entry.whole) == (everyone, uncut(entry.shape)) for entry in entries)


def test_a_checkpoint_is_compared_with_whole_shapes(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    shapes = whole_shapes([cut_unit(model)])
    wanted = wanted_tensors(model, whole_shapes=shapes)
    assert wanted == [("weight", "param", (6, 4)), ("bias", "param", (6,))]
    tensors = {("weight", "param"): StoredTensor((6, 4), "F32"), ("bias", "param"): StoredTensor((6,), "F32")}
    check_fit(Index(1, tensors, {}), tmp_path, wanted, strict=True)
    with pytest.raises(CheckpointError, match=r"has shape \(6, 4\); the model's has \(3, 4\)"):
        check_fit(Index(1, tensors, {}), tmp_path, wanted_tensors(model, whole_shapes={}), strict=True)


def _holders(stage: int) -> tuple[list[tuple[Holders, Holders]], dict[str, set[Holders]]]:
    """Holders and ranks of the units, and holders of the entries by role."""
    model = TinyGPT()
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    engine = make_engine(config(stage, micro=3), model=model)
    train(engine, range(1), samples=6)
    units, frozen = sharded_of(engine).units, sharded_of(engine).frozen
    entries = parameter_entries(model, units, everyone=all_of(2, engine.global_rank), frozen_units=frozen)
    entries += shards_of(engine).saved.state_entries()
    by_role = {role: {entry.holders for entry in entries if entry.role == role} for role in ("param", "exp_avg")}
    found = [(unit.holders, unit.ranks) for unit in (*units, *frozen)]
    engine.destroy()
    return found, by_role


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_units_know_their_holders_at_every_stage(stage: int) -> None:
    for rank, (units, by_role) in enumerate(run_ranks(2, _holders, stage)):
        everyone = all_of(2, rank)
        owner = SOLE_HOLDER if stage else everyone
        assert units
        assert set(units) == {(owner, everyone)}
        assert by_role["exp_avg"] == {owner}
        assert by_role["param"] <= {owner, everyone}
