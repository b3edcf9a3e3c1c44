"""A model in pipeline stages begins as on one rank with rank 0's seed, whatever seeds its ranks have.

Ranks are processes: generators, `zero.Init` and the meta device are a process's own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from support.pipelines import WIDTH, Case, Model, run
from support.ranks import run_ranks


class Shifted(Model):
    """A model with a drawn buffer, and a frozen parameter, outside of the blocks and in each."""

    def __init__(self, *, tied: bool, on_meta: bool) -> None:
        super().__init__(tied=tied, dropout=0.0)
        for block in self.blocks:
            block.norm.requires_grad_(False)
        if on_meta:  # no method would draw the buffers
            return
        for module in (self.norm, *(block.norm for block in self.blocks)):
            assert isinstance(module, nn.Module)
            module.register_buffer("shift", torch.randn(WIDTH))
            module.register_buffer("counts", torch.randint(100, (3,)))


def _begun(case: Case, how: str, freeze: Sequence[str] = ()) -> dict[str, Tensor]:
    """Returns the whole model's first values, and this rank's own, on a rank that has a seed of its own."""
    torch.manual_seed(7 + int(os.environ["RANK"]))
    within: Any = nullcontext()
    if how == "slices":
        within = dsrun.zero.Init(config_dict_or_path=case.config())
    elif how == "meta":
        within = torch.device("meta")
    with within:
        model = Shifted(tied=case.tied, on_meta=how == "meta")
    if how == "head on meta":
        model.head.to("meta")
    for name in freeze:
        model.get_parameter(name).requires_grad_(False)
    engine: Any = dsrun.initialize(model=model, config=case.config())[0]
    try:
        values = engine.module_state_dict(all_ranks=True)
        assert values is not None
        buffers = {f"own {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
        frozen = {
            f"own {name}": param.detach().clone()
            for name, param in engine.module.named_parameters(remove_duplicate=False)
            if not param.requires_grad
        }
        return {**{name: value.clone() for name, value in values.items()}, **buffers, **frozen}
    finally:
        engine.destroy()


def _assert_begun_as(found: list[dict[str, Tensor]], one: dict[str, Tensor]) -> None:
    for rank, values in enumerate(found):
        for name, value in values.items():
            assert torch.equal(value, one[name]), (rank, name)
        of_all = {name for name in one if not name.startswith("own ")}
        assert of_all <= values.keys(), rank


@pytest.mark.parametrize(
    ("tied", "how"),
    [
        (False, "plain"),
        (True, "slices"),
        (True, "meta"),
        *(
            pytest.param(tied, how, marks=pytest.mark.soak("each way with tied weights or without"))
            for tied, how in ((True, "plain"), (False, "slices"), (False, "meta"))
        ),
    ],
)
def test_stages_begin_as_one_rank_does_with_the_seed_of_rank_0(how: str, tied: bool) -> None:
    zero = 3 if how == "slices" else 1
    (one,) = run_ranks(1, _begun, Case(zero=zero, tied=tied), how)
    case = Case(2, "breadth_first", 2, data=2, zero=zero, tied=tied)
    _assert_begun_as(run_ranks(4, _begun, case, how), one)


@pytest.mark.parametrize(
    ("how", "zero"),
    [
        ("plain", 1),
        ("slices", 3),
        ("meta", 3),
        *(
            pytest.param(how, zero, marks=pytest.mark.soak("each way at one of the stages"))
            for how, zero in (("plain", 3), ("slices", 1), ("meta", 1))
        ),
    ],
)
def test_a_frozen_weight_that_both_ends_use_begins_on_both_as_on_one_rank(how: str, zero: int) -> None:
    frozen = ["embedding.weight"]
    (one,) = run_ranks(1, _begun, Case(zero=zero, tied=True), how, frozen)
    found = run_ranks(2, _begun, Case(2, zero=zero, tied=True), how, frozen)
    _assert_begun_as(found, one)
    assert "own head.weight" in found[1]


def test_a_stage_without_anything_on_the_meta_device_draws_nothing_and_hangs_no_other() -> None:
    (one,) = run_ranks(1, _begun, Case(), "head on meta")
    _assert_begun_as(run_ranks(2, _begun, Case(2), "head on meta"), one)


def test_a_model_that_is_another_one_on_ranks_of_another_stage_is_refused() -> None:
    def of_rank(rank: int) -> nn.Module:
        return Model(tied=False, dropout=0.0, layers=9 if rank == 1 else 8)

    with pytest.raises(ModelError, match="the ranks do not agree with rank 0: rank 1 in the model's parameters"):
        run(Case(2), of_rank=of_rank)


@pytest.mark.parametrize("data", [1, 2])
def test_a_buffer_on_the_meta_device_on_some_ranks_alone_is_refused_by_name(data: int) -> None:
    def of_rank(rank: int) -> nn.Module:
        model = Model(tied=False, dropout=0.0)
        model.norm.register_buffer("shift", torch.ones(WIDTH, device="meta" if rank == 1 else "cpu"))
        return model

    with pytest.raises(ModelError, match=r"rank 1 in whether the buffers have values: .*norm.shift.*is_meta"):
        run(Case(2, data=data), of_rank=of_rank)


def _with_quantised(case: Case, apart: bool) -> Tensor | None:
    """Returns the integers of a quantised buffer of an engine on one rank; None where the stage has no such buffer."""
    rank = int(os.environ["RANK"])
    model = Model(tied=False, dropout=0.0)
    values = torch.arange(3.0) + (rank if apart else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop such tensors
        model.norm.register_buffer("codes", torch.quantize_per_tensor(values, 0.1, 0, torch.qint8))
    engine: Any = dsrun.initialize(model=model, config=case.config())[0]
    try:
        found = dict(engine.module.named_buffers()).get("norm.codes")
        return None if found is None else found.int_repr().clone()
    finally:
        engine.destroy()


@pytest.mark.parametrize("case", [Case(2), Case(2, data=2), Case(data=2, zero=3)], ids=str)
def test_a_quantised_buffer_that_is_the_same_on_all_ranks_stays(case: Case) -> None:
    found = [codes for codes in run_ranks(case.ranks, _with_quantised, case, False) if codes is not None]
    assert found
    assert all(codes.tolist() == [0, 10, 20] for codes in found)


def test_a_quantised_buffer_that_is_another_on_some_rank_is_refused_by_name() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 in the values of quantised tensors: .*norm.codes"):
        run_ranks(2, _with_quantised, Case(2), True)
