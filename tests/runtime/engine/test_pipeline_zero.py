"""ZeRO 2 and 3 in pipeline stages: the bits of one stage, and the bytes that chunks taking turns hold and move."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import dsrun
from dsrun.estimate.memory.model_state import pad_units, state_bytes
from dsrun.estimate.model.units import UnitGroup
from dsrun.estimate.run.settings import read_settings
from dsrun.estimate.time.collectives import gathered_by_chunk
from support.covering import covering
from support.pipelines import Case, Ended, Model, assert_same, items, loss_fn, run, train
from support.ranks import run_ranks

#: All units are gathered, small ones too.
CUT: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
WHOLE = [Case(2, "gpipe"), Case(2, "1f1b"), Case(2, "interleaved", 2), Case(2, "zero_bubble"), Case(2, "zbv", 2)]
TURNS = [Case(2, "breadth_first", 2), Case(2, "breadth_first", 4), Case(4, "breadth_first", 2)]


def cut(case: Case, **more: Any) -> Case:
    zero = {"stage": 3, **CUT, **more.pop("zero_optimization", {})}
    return replace(case, zero=3, more={**more, "zero_optimization": zero})


TIED = {"apart": False, "tied": True}


@functools.cache
def one_stage(*, data: int = 1, tied: bool, dtype: str = "fp32") -> Ended:
    return run(Case(data=data, tied=tied, dtype=dtype))[0]


@pytest.mark.parametrize(("case", "tied"), covering({str(case): case for case in WHOLE}, TIED, together=1))
def test_stages_that_hold_their_parameters_have_the_bits_of_one_stage(case: Case, tied: bool) -> None:
    assert_same(run(replace(case, zero=3, tied=tied)), one_stage(tied=tied))


@pytest.mark.parametrize(
    ("case", "dtype", "tied"), covering({str(case): case for case in TURNS}, {"fp32": "fp32", "bf16": "bf16"}, TIED)
)
def test_chunks_that_take_turns_have_the_bits_of_one_stage(case: Case, dtype: str, tied: bool) -> None:
    assert_same(run(replace(cut(case), tied=tied, dtype=dtype)), one_stage(tied=tied, dtype=dtype))


@pytest.mark.parametrize(
    ("virtual", "zero", "tied"), covering({"2 chunks": 2, "4 chunks": 4}, {"zero2": 2, "zero3": 3}, TIED)
)
def test_with_data_ranks_they_have_the_bits_of_data_ranks_alone(virtual: int, zero: int, tied: bool) -> None:
    case = cut(Case(2, "breadth_first", virtual, data=2, tied=tied))
    case.more["zero_optimization"]["stage"] = zero
    assert_same(run(replace(case, zero=zero)), one_stage(data=2, tied=tied))


@pytest.mark.parametrize(
    "more",
    [
        {"activation_checkpointing": {"policy": "every_block"}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage3_max_live_parameters": 30_000}},
    ],
    ids=["recomputed", "host optimizer", "all on the host", "parameters on the host", "one chunk live"],
)
def test_with_what_else_there_is_they_have_the_same_bits(more: dict[str, Any]) -> None:
    one = one_stage(data=2, dtype="bf16", tied=True)
    assert_same(run(cut(Case(2, "breadth_first", 4, data=2, dtype="bf16", tied=True), **more)), one)


@pytest.mark.parametrize(
    "tied",
    [pytest.param(False, marks=pytest.mark.soak("tied weights")), True],
    ids=["apart", "tied"],
)
def test_evaluations_before_and_between_updates_change_nothing_and_gather_each_chunk_once(tied: bool) -> None:
    def body(engine: Any, data_rank: int) -> tuple[Ended, list[float], list[int]]:
        evaluated: list[float] = []
        gathers: list[int] = []

        def evaluate() -> None:
            before = engine.counters()
            evaluated.append(float(engine.eval_batch(items(data_rank), loss_fn=loss_fn)))
            gathers.append(engine.counters().since(before).collectives.calls["all_gather"])
            assert not any(slot.is_taken for slot in getattr(engine._sharded.store, "_slots", ()))

        evaluate()
        first = train(engine, data_rank, updates=1)
        evaluate()
        rest = train(engine, data_rank, updates=2, first=1)
        ended = Ended(first.losses + rest.losses, first.norms + rest.norms, rest.weights)
        return ended, evaluated, gathers

    one = run(Case(tied=tied), body)[0]
    found = run(cut(Case(2, "breadth_first", 4, tied=tied)), body)
    assert_same([ended for ended, _, _ in found], one[0])
    # Four blocks, and at first two units of what stands outside of them, which later is there already.
    for _, evaluated, gathers in found:
        assert evaluated == one[1]
        assert gathers == [6, 4]


def test_a_global_batch_that_failed_lets_go_of_its_chunks() -> None:
    class Failed(Exception):
        pass

    kept: dict[str, int] = {}

    def body(engine: Any, data_rank: int) -> None:
        def count(when: str) -> None:
            kept[f"stage {engine.grid.get_stage_id()} {when}"] = sum(s.keepers for s in engine._sharded.store._slots)

        def fail(*_: Any) -> Any:
            count("in the loss")
            raise Failed

        engine.train_batch(items(data_rank), loss_fn=loss_fn)
        try:
            engine.train_batch(items(data_rank), loss_fn=fail)
        finally:
            count("after it")

    with pytest.raises(Failed):
        run(cut(Case(2, "breadth_first", 4)), body)
    # The last chunk has a block and the head, and the next one is gathered. The other stage is told of the end.
    assert kept == {"stage 1 in the loss": 3, "stage 1 after it": 0, "stage 0 after it": 0}


def held(engine: Any, data_rank: int) -> dict[str, Any]:
    train(engine, data_rank, updates=1)
    before = engine.counters()
    engine.train_batch(items(data_rank), loss_fn=loss_fn)
    moved = engine.counters().since(before).collectives
    sharded = engine._sharded
    turns = sharded.chunks.turns_of(sharded.units)
    last = len(sharded.chunks.stages.own) - 1
    return {
        "held": engine.model_state_bytes(),
        "predicted": engine._components.memory.predicted_bytes,
        "gathered": moved.bytes["all_gather"],
        "scattered": moved.bytes["reduce_scatter"],
        "units": [
            UnitGroup(
                name=unit.name,
                numel=unit.layout.numel,
                has_module=unit.module is not None,
                chunk=turns.get(unit.index, last),
            )
            for unit in sharded.units
        ],
        "settings": engine._settings,
    }


@pytest.mark.parametrize(
    ("dtype", "zero", "virtual"),
    covering({"fp32": "fp32", "bf16": "bf16"}, {"zero2": 2, "zero3": 3}, {"2 chunks": 2, "4 chunks": 4}),
)
def test_bytes_held_and_moved_are_those_of_the_plan(dtype: str, zero: int, virtual: int) -> None:
    case = cut(Case(2, "breadth_first", virtual, data=2, dtype=dtype))
    case.more["zero_optimization"]["stage"] = zero
    for found in run(replace(case, zero=zero), held):
        settings = read_settings(found["settings"], ranks=4)
        units = pad_units(found["units"], ranks=2)
        assert found["predicted"] == state_bytes(units, settings).total
        counts = found["held"] - found["predicted"]
        assert 0 <= counts <= 4 * len(units), "AdamW's count of steps, of each unit that the rank has elements of"
        wide = settings.compute_bytes
        if zero == 3:
            assert found["gathered"] == wide * gathered_by_chunk(units, settings.gather)
        assert found["scattered"] == 4 * sum(unit.padded for unit in units)


def test_chunks_that_take_turns_hold_less() -> None:
    def of(schedule: str, zero: int) -> int:
        case = cut(Case(2, schedule, 4, data=2, dtype="bf16"))
        case.more["zero_optimization"] |= {"stage": zero, "stage3_prefetch_bucket_size": 0}
        return max(found["held"] for found in run(replace(case, zero=zero), held))

    one, two, three = of("interleaved", 1), of("breadth_first", 2), of("breadth_first", 3)
    whole = of("interleaved", 2)
    assert of("interleaved", 3) == whole, "in other schedules parameters are whole"
    assert three < two < whole < one


def _built(case: Case) -> tuple[list[float], list[float]]:
    """Losses of a model that is built in slices, and of one that is built whole."""
    losses: list[list[float]] = []
    for in_slices in (True, False):
        torch.manual_seed(7)
        with dsrun.zero.Init(config_dict_or_path=case.config(), enabled=in_slices):
            model = Model(tied=False, dropout=0.0)
        engine: Any = dsrun.initialize(model=model, config=case.config())[0]
        losses.append(train(engine, engine.grid.get_data_parallel_rank(), updates=2).losses)
        engine.destroy()
    return losses[0], losses[1]


@pytest.mark.parametrize("case", [Case(2, "breadth_first", 2, data=2), Case(2, "1f1b", data=2)], ids=str)
def test_a_model_that_is_built_in_slices_is_cut_into_stages(case: Case) -> None:
    for in_slices, whole in run_ranks(4, _built, cut(case)):
        assert in_slices == whole
