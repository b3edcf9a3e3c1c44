"""What an engine holds for long lies in arenas as large as was predicted, stays there, and goes with the engine."""

from __future__ import annotations

import gc
import random
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dsrun.runtime.layout.unit_layout import UnitLayout
from support.inside_engine import components_of, hooks_of, predicted_bytes, sharded_of, step_of, tiers_of, units_of
from support.models import CONTEXT, TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, make_engine, train

STAGES = [0, 1, 2, 3]


# What lies where ------------------------------------------------------------------------------------------------------


def expected_bytes(layouts: list[UnitLayout], stage: int, *, bf16: bool, states: int) -> dict[str, int]:
    """Sums of a model whose last unit alone has no module; two slots that the others share."""
    compute = 2 if bf16 else 4
    full = sum(layout.padded_numel for layout in layouts)
    shard = sum(layout.shard_numel for layout in layouts)
    owned = shard if stage else full
    turns = [layout.padded_numel for layout in layouts[:-1]]
    slots = max(turns[::2]) + max(turns[1::2]) + layouts[-1].padded_numel
    found = {"parameter shards": shard * compute} if stage == 3 else {"parameters": full * compute}
    found |= {"masters": owned * 4} if bf16 else {}
    found |= {"gradient sums": owned * 4}
    found |= {"gather slots": slots * compute} if stage == 3 else {}
    found |= {"gradient slots": slots * compute} if stage >= 2 else {"gradients": full * compute}
    return found | {"moved-out gradients": 0} | ({"optimizer states": owned * states * 4} if states else {})


def _arenas(stage: int, bf16: bool, optimizer: str) -> list[tuple[dict[str, int], dict[str, int], int]]:
    engine = make_engine(config(stage, micro=2, bf16=bf16, optimizer=optimizer))
    layouts = [unit.layout for unit in units_of(engine)]
    assert [unit.module is None for unit in units_of(engine)] == [*[False] * (len(layouts) - 1), True]
    expected = expected_bytes(layouts, stage, bf16=bf16, states=2 if optimizer == "AdamW" else 1)
    found: list[tuple[dict[str, int], dict[str, int], int]] = []
    for step in range(2):
        report = engine.memory_arenas()
        assert all(use.used_bytes == use.high_water_bytes == use.reserved_bytes for use in report.arenas)
        found.append(({use.name: use.reserved_bytes for use in report.arenas}, expected, report.reserved_bytes))
        assert report.reserved_bytes == predicted_bytes(engine)
        train(engine, range(step, step + 1), samples=2 * engine.world_size)
    assert not {o.name for o in engine.memory_arenas().outside} - {"module buffers", "other optimizer states"}
    return found


def _all_arenas(stage: int) -> list[tuple[dict[str, int], dict[str, int], int]]:
    cases = ((False, "AdamW"), (True, "AdamW"), (True, "SGD"))
    return [one for bf16, optimizer in cases for one in _arenas(stage, bf16, optimizer)]


@pytest.mark.parametrize("stage", STAGES)
def test_arenas_are_what_the_layouts_say_from_the_start_and_together_what_was_predicted(stage: int) -> None:
    for rank in run_ranks(2, _all_arenas, stage):
        assert len(rank) == 3 * 2
        for found, expected, total in rank:
            assert found == expected
            assert total == sum(expected.values())


class Own(optim.Adam):
    """An optimizer nobody here knows."""


def test_what_lies_in_no_arena_is_named() -> None:
    model: Any = TinyGPT()
    model.norm.weight.requires_grad_(False)
    settings = config(1, micro=2, zero_allow_untested_optimizer=True)
    del settings["optimizer"]

    engine = make_engine(settings, model=model, optimizer=Own)
    train(engine, range(1), samples=2)
    report = engine.memory_arenas()
    outside = {use.name: use.used_bytes for use in report.outside}
    assert outside["frozen parameters"] == model.norm.weight.numel() * 4
    assert outside["module buffers"] == 4
    assert outside["other optimizer states"] > 2 * 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert "optimizer states" not in {use.name for use in report.arenas}
    assert "frozen parameters       outside" in str(report)


def test_a_parameter_that_is_saved_alone_takes_its_units_bytes_and_not_the_arenas() -> None:
    engine = make_engine(config(1, micro=2))
    param = engine.module.norm.weight
    unit = next(unit for unit in units_of(engine) if any(param is p for p in unit.params))
    assert param.untyped_storage().nbytes() == unit.layout.padded_numel * 4


# Over many steps ------------------------------------------------------------------------------------------------------


def held_storages() -> set[tuple[int, int]]:
    """Address and bytes of every storage that python's tensors hold now; run it in a process of its own.

    A test runner's process has tensors of other tests, among them the compiler's, which have no memory at all.
    """
    gc.collect()
    storages = [item.untyped_storage() for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return {(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()}


def held_bytes() -> int:
    """Bytes of memory behind all of python's tensors, each byte counted once, however many storages lie over it."""
    total = last = 0
    for start, numel in sorted(held_storages()):
        total += max(0, start + numel - max(start, last))
        last = max(last, start + numel)
    return total


#: Every pair of stage, bf16, and whether the optimizer is this library's or the script's.
HELD = [(stage, bf16, "AdamW" if (stage + bf16) % 2 else None) for stage in STAGES for bf16 in (False, True)]


@pytest.mark.parametrize(
    ("stage", "bf16", "optimizer"),
    [
        *HELD,
        *(
            pytest.param(stage, bf16, None if own else "AdamW", marks=pytest.mark.soak("all pairs of what differs"))
            for stage, bf16, own in HELD
        ),
    ],
)
def test_nothing_is_held_between_steps_that_the_report_does_not_tell(
    stage: int, bf16: bool, optimizer: str | None
) -> None:
    run_ranks(1, _held, stage, bf16, optimizer)


def _held(stage: int, bf16: bool, optimizer: str | None) -> None:
    before = held_bytes()
    settings = config(stage, micro=2, bf16=bf16, optimizer=optimizer or "", zero_allow_untested_optimizer=True)
    if optimizer is None:
        del settings["optimizer"]
    engine = make_engine(settings, optimizer=Own if optimizer is None else None)
    train(engine, range(2), samples=2)
    report = engine.memory_arenas()
    unused = 8  # the number of parameters that no rank has used
    in_slots = units_of(engine) if stage == 3 else ()
    places = {param.data_ptr() for unit in in_slots for param in unit.params}
    places_of_marks = 8 * len(places)  # where values are that a step makes stale
    told = report.reserved_bytes + sum(use.used_bytes for use in report.outside) + unused + places_of_marks
    # A thread of Gloo's lets go of the last loss a moment after it has told that its sum is there.
    deadline_s = time.monotonic() + 30
    while (held := held_bytes() - before) != told and time.monotonic() < deadline_s:
        pass
    assert held == told


def _flat(stage: int, steps: int, bf16: bool) -> None:
    engine = make_engine(config(stage, micro=2, bf16=bf16))
    lengths = random.Random(5)
    reports: list[str] = []
    storages: list[set[tuple[int, int]]] = []
    for step in range(steps):
        length = lengths.randint(1, CONTEXT)
        inputs, targets = batches(step, samples=2)
        engine.backward(loss_of(engine(inputs[:, :length]), targets[:, :length]))
        engine.step()
        if step >= 2:
            reports.append(str(engine.memory_arenas()))
            assert not any(use.hole_bytes for use in engine.memory_arenas().arenas)
            del inputs, targets
            storages.append(held_storages())
    assert len(set(reports)) == 1
    assert all(found == storages[0] for found in storages), "what is held between steps stays where it is"


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_moves_or_grows_over_steps_of_changing_sequence_lengths(stage: int) -> None:
    run_ranks(1, _flat, stage, 8, stage == 1)


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_moves_or_grows_on_ranks_that_share_memory(stage: int) -> None:
    run_ranks(2, _flat, stage, 6, True)


# When the engine is gone ----------------------------------------------------------------------------------------------


def _parts_of(engine: Any) -> dict[str, weakref.ref[Any]]:
    sharded, components = sharded_of(engine), components_of(engine)
    watched = {
        "engine": engine,
        "optimizer": engine.optimizer,
        "hooks": hooks_of(engine).units,
        "arenas": tiers_of(engine).memory,
        "collectives": step_of(engine).world,
        "checkpoints": components.checkpoints,
        "backwards": components.backwards,
        "memory queries": components.memory,
        "reducer": sharded.reducer,
        "store": sharded.store,
        "unit": sharded.units[0],
    }
    return {name: weakref.ref(part) for name, part in watched.items()}


def _alive(parts: dict[str, weakref.ref[Any]]) -> set[str]:
    return {name for name, part in parts.items() if part() is not None}


def _collect(stage: int, folder: Path | None = None) -> list[str]:
    """Trains, saves if there is a folder, drops everything a script has of it, and returns what is still there."""
    model = TinyGPT()
    engine = make_engine(config(stage, micro=2), model=model)
    train(engine, range(2), samples=2 * engine.world_size)
    if folder is not None:
        engine.save_checkpoint(folder)
        engine.wait_for_checkpoint()
    parts = {**_parts_of(engine), "model": weakref.ref(model)}
    gc.collect()
    gc.disable()
    try:
        del engine
        assert "engine" not in _alive(parts), "no callback and no cycle holds it"
    finally:
        gc.enable()
    del model
    gc.collect()
    return sorted(_alive(parts))


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_is_dropped_is_freed_at_once_and_the_rest_with_its_model(stage: int) -> None:
    assert _collect(stage) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_a_save_keeps_nothing_of_an_engine_that_is_dropped(stage: int, tmp_path: Path) -> None:
    assert _collect(stage, tmp_path) == []


def test_real_ranks_free_their_engines_too() -> None:
    assert run_ranks(2, _collect_all) == [[[]] * 4] * 2


def _collect_all() -> list[list[str]]:
    return [_collect(stage) for stage in STAGES]


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_whose_engine_was_dropped_computes_what_it_computed(stage: int) -> None:
    model: nn.Module = TinyGPT()
    engine = make_engine(config(stage, micro=2), model=model)
    train(engine, range(2), samples=2)
    inputs, _ = batches(9, samples=2)
    with torch.no_grad():
        expected = engine(inputs).clone()
        del engine
        gc.collect()
        assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_after_destroy_a_whole_model_is_an_ordinary_one_and_nothing_else_stays(stage: int) -> None:
    model: Any = TinyGPT()
    engine = make_engine(config(stage, micro=2), model=model)
    train(engine, range(2), samples=2)
    parts = _parts_of(engine)
    inputs, targets = batches(9, samples=2)
    with torch.no_grad():
        expected = engine(inputs).clone()
    engine.destroy()
    del engine
    gc.collect()
    assert _alive(parts) == set()
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(model(inputs).detach(), expected)
    loss_of(model(inputs), targets).backward()
    optim.SGD(model.parameters(), lr=0.1).step()
    model.load_state_dict(TinyGPT().state_dict())
