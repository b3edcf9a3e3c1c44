"""Frozen parameters cost each rank its slice at stage 3, and change no bit of what is trained beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsrun
from dsrun.choices.gather_plan import GatherBudgets
from dsrun.errors import ModelError
from dsrun.estimate.memory.model_state import pad_units, state_bytes
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.collectives import collective_bytes
from dsrun.runtime.engine.compose.describe import describe
from dsrun.runtime.engine.model.ownership import let_go
from dsrun.runtime.zero.units.find import find_frozen_units, find_units
from support.inside_engine import hooks_of, predicted_bytes, sharded_of, shards_of, store_of
from support.models import AdaptedBlock, TinyGPT
from support.ranks import run_ranks
from support.training import config, frozen_parameters, full_parameters, make_engine, train

WIDTH = 72


class Adapted(TinyGPT):
    """Frozen but for adapters in the blocks, one of which has none and is frozen whole."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__(width=WIDTH, layers=4, tied=tied)
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(AdaptedBlock(WIDTH, 4) for _ in range(4))
        self.blocks[2].requires_grad_(False)


class TrainedHead(Adapted):
    """The tied weight of embedding and head is trained, all around it is not."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.embed.requires_grad_()


class LowerHalf(TinyGPT):
    """The first blocks are frozen whole, embedding included."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, layers=4)
        for part in (self.embed, self.position, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)


class ReadsFrozen(LowerHalf):
    """The head is used with a weight of the frozen embedding, which is read outside of its module."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT) + F.linear(
            F.one_hot(tokens_BT, 61).to(self.embed.weight) @ self.embed.weight, self.embed.weight
        )


MODELS = {
    "adapters": Adapted,
    "tied and frozen": lambda: Adapted(tied=True),
    "tied and trained": TrainedHead,
    "lower half": LowerHalf,
    "reads outside": ReadsFrozen,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]()


def engine_of(name: str, stage: int, *, poison: bool = True, **options: Any) -> Any:
    zero = options.pop("zero", {})
    settings = config(stage, micro=options.pop("micro", 2), **options)
    settings["zero_optimization"].update(zero)
    engine = make_engine(settings, model=build(name))
    if stage == 3:
        store_of(engine).poison = poison
    return engine


def _train(cases: list[tuple[str, bool, int]], settings: list[list[dict[str, Any]]]) -> list[list[Any]]:
    """Losses and weights of each case (model, bf16, accumulation steps) with each of its `zero_optimization`."""
    found: list[list[Any]] = []
    for (name, bf16, accumulation), sections in zip(cases, settings, strict=True):
        found.append([])
        for zero in sections:
            engine = engine_of(name, zero["stage"], bf16=bf16, accumulation=accumulation, zero=zero)
            losses = train(engine, range(3), samples=2 * accumulation * engine.world_size)
            found[-1].append((losses, {**full_parameters(engine), **frozen_parameters(engine)}))
    return found


def assert_all_the_same(results: list[Any], what: object) -> None:
    losses, weights = results[0]
    for other_losses, other in results[1:]:
        assert other_losses == losses, what
        assert other.keys() == weights.keys()
        assert all(torch.equal(other[key], value) for key, value in weights.items()), what


_OF_TWO_RANKS = [
    ("adapters", True, 2),
    ("tied and frozen", False, 1),
    ("tied and trained", True, 1),
    ("lower half", False, 2),
    ("reads outside", False, 1),
]


@pytest.mark.parametrize(
    ("world_size", "cases", "others"),
    [
        (1, [("adapters", False, 2)], range(4)),
        # Below stage 3 a model's frozen parameters are whole, whatever it does with them.
        (2, _OF_TWO_RANKS, (0, 3)),
        (3, [("adapters", False, 1)], range(4)),
        pytest.param(2, _OF_TWO_RANKS, range(4), marks=pytest.mark.soak("all stages of the first model")),
    ],
)
def test_stages_agree_bit_for_bit(world_size: int, cases: list[tuple[str, bool, int]], others: Sequence[int]) -> None:
    stages = [range(4), *[others] * (len(cases) - 1)]
    for rank in run_ranks(world_size, _train, cases, [[{"stage": stage} for stage in some] for some in stages]):
        for case, results in zip(cases, rank, strict=True):
            assert_all_the_same(results, case)


def test_keys_of_gathering_change_no_bit() -> None:
    keys: list[dict[str, int]] = [
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_prefetch_bucket_size": 10**9},
        {"stage3_prefetch_bucket_size": 10**9, "stage3_max_live_parameters": 250_000},
        {"stage3_param_persistence_threshold": 1000},
        {"stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": 50_000},
        {"stage3_param_persistence_threshold": 10**6},
    ]
    settings = [{"stage": 2}, *({"stage": 3, **given} for given in keys)]
    for (results,) in run_ranks(2, _train, [("adapters", True, 2)], [settings]):
        assert_all_the_same(results, keys)


def test_a_module_s_frozen_parameters_are_a_unit_and_what_no_module_has_to_itself_is_none() -> None:
    assert [spec.name for spec in find_units(build("adapters"))] == ["blocks.0", "blocks.1", "blocks.3"]
    frozen = find_frozen_units(build("adapters"))
    assert [spec.name for spec in frozen] == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert [spec.name for spec in find_frozen_units(build("tied and frozen"))] == [f"blocks.{i}" for i in range(4)]
    model = LowerHalf()
    model.get_submodule("blocks.0.up").weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    model.get_submodule("blocks.0.down").bias = nn.Parameter(torch.zeros(0), requires_grad=False)
    names = {name for spec in find_frozen_units(model) for name, _ in spec.params}
    assert "blocks.0.up.bias" in names
    assert not names & {"blocks.0.up.weight", "blocks.0.down.bias", "norm.weight"}


def _measure(name: str, stage: int, bf16: bool, zero: dict[str, Any]) -> tuple[int, int, dict[str, int], int]:
    engine = engine_of(name, stage, bf16=bf16, accumulation=2, zero=zero, poison=False)
    samples = 4 * engine.world_size
    train(engine, range(2), samples=samples)
    before = engine.counters()
    train(engine, range(2, 3), samples=samples)
    sent = dict(engine.counters().since(before).collectives.bytes)
    steps = sum(tensor.nbytes for tensor in shards_of(engine).tensors() if tensor.dim() == 0)
    slices = sum(unit.shard.nbytes for unit in sharded_of(engine).frozen)
    return engine.model_state_bytes() - steps, predicted_bytes(engine), sent, slices


#: Optimizers keep no states for the padding at the end of a unit: two of fp32 for less than 256 elements a rank.
_PADDING_BYTES = 2 * 4 * 256 * 2


#: Model, stage, bf16, and keys of gathering.
CASES: list[tuple[str, int, bool, dict[str, int]]] = [
    ("adapters", 0, True, {}),
    ("adapters", 2, True, {}),
    ("adapters", 3, True, {}),
    ("adapters", 3, False, {"stage3_prefetch_bucket_size": 0}),
    ("adapters", 3, True, {"stage3_prefetch_bucket_size": 10**9, "stage3_max_live_parameters": 300_000}),
    ("adapters", 3, True, {"stage3_param_persistence_threshold": 1000}),
    ("adapters", 3, True, {"stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": 50_000}),
    ("tied and trained", 3, True, {}),
    ("lower half", 3, False, {}),
]


def _measure_all() -> list[Any]:
    return [_measure(*case) for case in CASES]


def test_memory_and_bytes_sent_are_what_a_plan_says() -> None:
    for rank in run_ranks(2, _measure_all):
        for (name, stage, bf16, keys), (state, predicted, traffic, _) in zip(CASES, rank, strict=True):
            size = describe(build(name))
            budgets = GatherBudgets(
                stay=keys.get("stage3_param_persistence_threshold", 0),
                stay_total=keys.get("stage3_model_persistence_threshold", GatherBudgets().stay_total),
                ahead=keys.get("stage3_prefetch_bucket_size"),
                live=keys.get("stage3_max_live_parameters"),
            )
            settings = RunSettings(stage=stage, compute_bytes=2 if bf16 else 4, accumulation_steps=2, gather=budgets)
            units = pad_units(size.units, 2)
            planned = state_bytes(units, settings, frozen_numel=size.frozen_numel).total
            assert predicted == planned, f"{name} {keys}: the runtime predicts what the plan says"
            assert predicted - _PADDING_BYTES * len(units) <= state <= predicted
            sent = collective_bytes(units, settings)
            assert traffic.get("all_gather", 0) == sent.all_gather, f"{name} {keys}"
            assert traffic.get("reduce_scatter", 0) == sent.reduce_scatter


def test_a_frozen_model_of_adapters_costs_a_rank_its_slice_in_bf16() -> None:
    frozen = sum(
        param.numel() for _, param in ((n, p) for s in find_frozen_units(build("adapters")) for n, p in s.params)
    )
    for *_, slices in run_ranks(2, _measure, "adapters", 3, True, {}):
        assert slices == pytest.approx(2 * frozen / 2, rel=0.02)  # 2 bytes over 2 ranks, and gaps


@pytest.mark.parametrize("stage", [0, 3])
def test_toggling_requires_grad_later_is_refused_by_name(stage: int) -> None:
    for name, on in (("blocks.0.up.weight", True), ("blocks.0.low.weight", False)):
        engine = engine_of("adapters", stage)
        engine.module.get_parameter(name).requires_grad_(on)
        with pytest.raises(ModelError, match=name.replace(".", r"\.")):
            train(engine, range(1), samples=2)


def test_other_values_that_a_script_gives_a_frozen_parameter_are_computed_with_at_every_stage() -> None:
    losses: list[list[float]] = []
    for stage in (0, 3):
        engine = engine_of("adapters", stage, poison=False)
        train(engine, range(1), samples=2)
        weight = engine.module.blocks[2].up.weight
        weight.data = weight.data * 0.5
        losses.append(train(engine, range(1, 3), samples=2))
    assert losses[0] == losses[1]


def _save(stage: int, folder: str) -> list[Any]:
    engine = engine_of("adapters", stage, bf16=True)
    train(engine, range(2), samples=2 * engine.world_size)
    with dsrun.zero.GatheredParameters(engine.module.head.weight, modifier_rank=0), torch.no_grad():
        engine.module.head.weight.mul_(1.0 + engine.global_rank)  # rank 0's is what counts
        engine.module.head.weight[0] = 0.25
    engine.save_checkpoint(folder)
    return [{**full_parameters(engine), **frozen_parameters(engine)}]


def _load(stages: list[int], folder: str) -> list[Any]:
    found: list[Any] = []
    for stage in stages:
        engine = engine_of("adapters", stage, bf16=True)
        for param in engine.module.parameters():
            with dsrun.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
                param.fill_(9.0)
        engine.eval()
        with torch.no_grad():
            engine(torch.zeros(1, 3, dtype=torch.int64))  # leaves the old values in slots
        engine.train()
        engine.load_checkpoint(folder)
        weights = {**full_parameters(engine), **frozen_parameters(engine)}
        found.append((weights, train(engine, range(2, 3), samples=2 * engine.world_size)))
    return found


@pytest.mark.parametrize(("saved_at", "ranks"), [(3, 2), (0, 1)])
def test_checkpoints_load_at_every_stage_and_on_any_number_of_ranks(saved_at: int, ranks: int, tmp_path: Path) -> None:
    expected = run_ranks(ranks, _save, saved_at, str(tmp_path))[0][0]
    assert bool((expected["head.weight"][0] == 0.25).all())
    (rank, *_) = run_ranks(3 if ranks == 2 else 2, _load, [3, 1], str(tmp_path))
    for weights, losses in rank:
        assert all(torch.equal(weights[name].bfloat16(), value.bfloat16()) for name, value in expected.items())
        assert losses == rank[0][1]


def _look(stage: int) -> dict[str, Any]:
    engine = engine_of("adapters", stage, bf16=True)
    plain = build("adapters")
    expected = {name: value.bfloat16() for name, value in plain.named_parameters()}
    frozen = engine.module.blocks[1].up.weight
    found: dict[str, Any] = {
        "sharded": hasattr(frozen, "ds_id"),
        "shape": tuple(frozen.shape),
        "piece": frozen.ds_tensor.numel() if stage == 3 else None,
        "no master": dsrun.zero.safe_get_full_fp32_param(frozen),
        "no gradient": dsrun.zero.safe_get_full_grad(frozen),
    }
    before = engine.counters()
    weights = engine.module_state_dict(all_ranks=True)
    found["gathers"] = engine.counters().since(before).collectives.calls["all_gather"]
    found["exported"] = all(torch.equal(weights[name], value) for name, value in expected.items())
    found["without frozen"] = sorted(engine.module_state_dict(True, all_ranks=True))
    weights["blocks.1.up.weight"] = weights["blocks.1.up.weight"] + 1
    engine.load_module_state_dict(weights)
    with dsrun.zero.GatheredParameters(engine.module.blocks[1].parameters()):
        found["loaded"] = torch.equal(frozen, weights["blocks.1.up.weight"])
        inside = engine.module.blocks[1].state_dict()["up.weight"]
        found["state dict"] = torch.equal(inside, weights["blocks.1.up.weight"])
    try:
        engine.module.state_dict()["blocks.1.up.weight"].clone()
        found["refused"] = False
    except ModelError:
        found["refused"] = True
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_are_looked_at_changed_and_exported_as_others_are(stage: int) -> None:
    names = sorted(name for name, param in build("adapters").named_parameters() if param.requires_grad)
    ranks = run_ranks(2, _look, stage)
    for found in ranks:
        assert found["sharded"] is (stage == 3)
        assert found["shape"] == (217, 72)
        assert found["no master"] is None
        assert found["no gradient"] is None
        assert found["gathers"] == (9 if stage == 3 else 0), "three trained units and six frozen ones"
        assert [name for name in found["without frozen"] if name != "scale"] == names, "`scale` is a buffer"
        assert found["exported"]
        assert found["loaded"]
        assert found["state dict"]
        assert found["refused"] is (stage == 3)
    if stage == 3:
        assert sum(found["piece"] for found in ranks) == 217 * 72


def _take_again(first: int, second: int) -> list[bool]:
    engine = engine_of("adapters", first)
    train(engine, range(1), samples=2)
    before = {**full_parameters(engine), **frozen_parameters(engine)}
    model = engine.module
    let_go(model, hooks_of(engine).units, hooks_of(engine).activations, stays_sharded=first == 3)
    again = make_engine(config(second, micro=2), model=model)
    after = {**full_parameters(again), **frozen_parameters(again)}
    return [torch.equal(after[name], value) for name, value in before.items()]


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 1), (0, 3)])
def test_the_next_engine_takes_frozen_values_over(first: int, second: int) -> None:
    assert all(_take_again(first, second))


def test_evaluation_alone_gathers_frozen_blocks_and_gives_the_same_numbers() -> None:
    tokens = torch.arange(9).view(1, 9)
    found: list[Tensor] = []
    for stage in (2, 3):
        engine = engine_of("adapters", stage)
        with torch.no_grad():
            found += [engine(tokens), engine(tokens)]
    assert all(torch.equal(found[0], other) for other in found[1:])
