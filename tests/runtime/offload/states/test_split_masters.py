"""Masters in two halves train as whole ones do, to the bit, in 2 bytes an element less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsrun
from dsrun.runtime.offload.states.scratch import Scratch
from dsrun.runtime.offload.states.split_masters import UnitHalves
from support.inside_engine import predicted_bytes, units_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, make_engine, train

Weights = dict[str, Tensor]


def from_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def test_parts_are_stepped_by_themselves_and_keep_the_ties_of_each_other() -> None:
    tie = 0x3F808000
    masters = from_bits(tie, 0x3F800001, tie, 0x40000000, tie, 0)
    shard = masters.bfloat16()
    halves = UnitHalves(torch.empty(6, dtype=torch.int16), masters)
    halves.take_upper(shard)
    assert torch.equal(halves.joined(), masters)
    part = halves.of(2, 4)
    assert part.ties.tolist() == [0]
    part.split(0, from_bits(0x3F800002, tie), Scratch())
    part.settle()
    halves.keep(2, part)
    expected = from_bits(tie, 0x3F800001, 0x3F800002, tie, tie, 0)
    assert torch.equal(halves.joined(), expected)
    assert torch.equal(shard, expected.bfloat16())


def settings(split: bool | None, *, form: str = "fp32", **more: Any) -> dict[str, Any]:
    """A config at stage 3 with everything in host memory; None: nothing is."""
    made = config(3, micro=2, bf16=True, **more)
    if split is not None:
        section = {"device": "cpu", "split_master": split, "state_format": form}
        made["zero_optimization"] |= {"offload_optimizer": section, "offload_param": {"device": "cpu"}}
    return made


def made(split: bool | None, seed: int = 7, **more: Any) -> Any:
    """An engine with two optimizer groups."""
    torch.manual_seed(seed)
    model = TinyGPT()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return dsrun.initialize(model=model, config=settings(split, **more), model_parameters=groups)[0]


def weights(engine: Any) -> Weights:
    """The masters, and what forward reads."""
    found: Weights = {}
    for name, param in engine.module.named_parameters():
        master = dsrun.utils.safe_get_full_fp32_param(param)
        assert master is not None
        found[name] = master
        with dsrun.zero.GatheredParameters([param]):
            found[f"{name} read"] = param.detach().clone()
    return found


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _compare(cases: list[dict[str, Any]], folder: str) -> None:
    for number, case in enumerate(cases):
        plain, split = made(None, **case), made(True, **case)
        samples = 2 * plain.world_size * case.get("accumulation", 1)
        for steps in (range(3), range(3, 5)):
            assert train(split, steps, samples=samples) == train(plain, steps, samples=samples), case
            assert_same(weights(split), weights(plain))
        counts = sum(t.nbytes for state in split.optimizer.state.values() for t in state.values() if t.ndim == 0)
        assert split.model_state_bytes() == predicted_bytes(split) + counts
        numel = sum(unit.layout.shard_numel for unit in units_of(split))
        (low,) = [use for use in split.memory_arenas().arenas if "masters" in use.name]
        assert (low.name, low.reserved_bytes) == ("low halves of masters", 2 * numel)
        split.save_checkpoint(f"{folder}/{number}", tag="t")
        expected = weights(split)
        plain.destroy()
        split.destroy()
        for other in (True, False):
            again = made(other, seed=11, **case)
            again.load_checkpoint(f"{folder}/{number}", tag="t")
            assert_same(weights(again), expected)
            again.destroy()


def test_bits_memory_and_checkpoints_of_one_rank(tmp_path: Path) -> None:
    cases = [{}, {"accumulation": 2, "optimizer": "SGD"}]
    run_ranks(1, _compare, cases, str(tmp_path))


def test_bits_memory_and_checkpoints_of_two_ranks(tmp_path: Path) -> None:
    run_ranks(2, _compare, [{}], str(tmp_path))


def test_where_parameters_are_not_in_slices_the_key_does_nothing() -> None:
    asked = settings(True)
    asked["zero_optimization"]["stage"] = 2
    engine = make_engine(asked)
    assert all(unit.halves is None for unit in units_of(engine))
    engine.destroy()


def test_masters_and_parameters_are_set_in_both_halves() -> None:
    found: list[Weights] = []
    for split in (None, True):
        engine = make_engine(settings(split))
        train(engine, range(2), samples=2)
        first, second, *_ = [p for p in engine.module.parameters() if p.ndim == 2]
        master = dsrun.utils.safe_get_full_fp32_param(first)
        assert master is not None
        dsrun.utils.safe_set_full_fp32_param(first, master * 1.001)
        with dsrun.zero.GatheredParameters([second], modifier_rank=0):
            second.data[0] += 1
        found.append(weights(engine))
        train(engine, range(2, 4), samples=2)
        found[-1] |= {f"{name} later": value for name, value in weights(engine).items()}
        engine.destroy()
    assert_same(found[1], found[0])


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_states_may_be_narrow_as_well(form: str) -> None:
    found: list[Weights] = []
    for split in (False, True):
        engine = make_engine(settings(split, form=form))
        train(engine, range(3), samples=2)
        found.append(weights(engine))
        engine.destroy()
    assert_same(found[1], found[0])
