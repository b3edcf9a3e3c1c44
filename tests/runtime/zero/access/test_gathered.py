"""Parameters whole for a while, at every stage: read, changed on one rank, nested, and refused where that is wrong."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dsrun
from dsrun.errors import ModelError
from dsrun.zero import GatheredParameters, ZeroParamStatus, is_zero_param
from support.inside_engine import units_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = [0, 1, 2, 3]


def gpt(seed: int = 7) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def traffic(engine: Any) -> tuple[dict[str, int], dict[str, int]]:
    counted = engine.counters().collectives
    return dict(counted.calls), dict(counted.bytes)


def spent(engine: Any, work: Callable[[], object]) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives that `work` enters: (calls, bytes)."""
    before = traffic(engine)
    work()
    after = traffic(engine)
    calls, sizes = (
        {k: v - old.get(k, 0) for k, v in new.items() if v != old.get(k, 0)}
        for old, new in zip(before, after, strict=True)
    )
    return calls, sizes


# Reading --------------------------------------------------------------------------------------------------------------


def _read(stage: int, bf16: bool) -> list[Any]:
    engine = make_engine(config(stage, micro=2, bf16=bf16))
    train(engine, range(2), samples=2 * engine.world_size)
    masters = full_parameters(engine)
    seen: dict[str, Tensor] = {}
    for name, param in engine.module.named_parameters():  # one by one
        with GatheredParameters(param):
            seen[name] = param.detach().clone().float()
    whole: dict[str, Tensor] = {}
    with GatheredParameters(p for p in engine.module.parameters()):  # all units at once
        whole = {name: param.detach().clone().float() for name, param in engine.module.named_parameters()}
        state = {name: value.clone().float() for name, value in engine.module.state_dict().items() if name in whole}
    expected = {name: value.to(torch.bfloat16).float() if bf16 else value for name, value in masters.items()}
    losses = train(engine, range(2, 4), samples=2 * engine.world_size)
    return [same(seen, expected), same(whole, expected), same(state, expected), losses]


def test_every_stage_reads_the_same_values_and_trains_on_undisturbed() -> None:
    losses: list[Any] = []
    for stage in STAGES:
        for rank in run_ranks(2, _read, stage, True):
            assert rank[:3] == [True, True, True]
            losses.append(rank[3])
    assert all(other == losses[0] for other in losses)


def _read_costs(stage: int) -> dict[str, Any]:
    engine = make_engine(config(stage, micro=2))
    block = engine.module.blocks[0]
    unit = next(u for u in units_of(engine) if u.module is block)

    def read(params: Any) -> None:
        with GatheredParameters(params):
            pass

    return {
        "block": spent(engine, lambda: read(block.parameters())),
        "one": spent(engine, lambda: read([block.norm_1.weight])),
        "twice": spent(engine, lambda: read([block.norm_1.weight, block.norm_1.weight])),
        "off": spent(engine, lambda: GatheredParameters(block.parameters(), enabled=False).__enter__()),
        "padded_bytes": unit.layout.padded_numel * 4,
    }


def test_a_unit_costs_one_all_gather_and_a_parameter_its_own_bytes() -> None:
    for costs in run_ranks(3, _read_costs, 3):
        assert costs["block"] == ({"all_gather": 1}, {"all_gather": costs["padded_bytes"]})
        assert costs["one"] == costs["twice"] == ({"broadcast": 1}, {"broadcast": 72 * 4})
        assert costs["off"] == ({}, {})
    for costs in run_ranks(2, _read_costs, 2):
        assert costs["block"] == costs["one"] == ({}, {})


# Writing --------------------------------------------------------------------------------------------------------------


def _write(stage: int, bf16: bool) -> tuple[bool, bool, list[float], dict[str, Tensor]]:
    engine = make_engine(config(stage, micro=2, bf16=bf16))
    train(engine, range(1), samples=2 * engine.world_size)
    before = full_parameters(engine)
    module = engine.module
    changed = [module.position, module.blocks[1].qkv.weight, module.head.weight]  # of three units
    with GatheredParameters([*changed, *module.blocks[0].parameters()], modifier_rank=engine.world_size - 1):
        if engine.global_rank == engine.world_size - 1:
            with torch.no_grad():
                module.position.zero_()
                module.blocks[1].qkv.weight.data[3:5] = 0.125
                module.head.weight.data = torch.full_like(module.head.weight, 0.25)
        else:
            module.position.data.fill_(9.0)  # only the modifier's values count
    before["position"].zero_()
    before["blocks.1.qkv.weight"][3:5] = 0.125
    before["head.weight"].fill_(0.25)
    masters = full_parameters(engine)
    with GatheredParameters(module.position):
        visible = bool((module.position == 0).all())
    losses = train(engine, range(1, 3), samples=2 * engine.world_size)
    return same(masters, before), visible, losses, full_parameters(engine)


_SOME = pytest.mark.soak("stages 0 and 3, and in bf16 stage 2")


@pytest.mark.parametrize(
    ("world_size", "bf16", "stages"),
    [
        (1, True, STAGES),
        (3, False, (0, 3)),
        (3, True, (0, 2, 3)),
        pytest.param(3, False, STAGES, marks=_SOME),
        pytest.param(3, True, STAGES, marks=_SOME),
    ],
)
def test_one_ranks_values_reach_the_masters_and_the_rest_keeps_its_bits(
    world_size: int, bf16: bool, stages: tuple[int, ...]
) -> None:
    results: list[Any] = []
    for stage in stages:
        for exact, visible, losses, weights in run_ranks(world_size, _write, stage, bf16):
            assert exact
            assert visible
            results.append((losses, weights))
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert same(weights, results[0][1])


def _write_costs() -> dict[str, Any]:
    engine = make_engine(config(3, micro=2))
    block = engine.module.blocks[0]

    def write(params: Any) -> None:
        with GatheredParameters(params, modifier_rank=0):
            pass

    unit = next(u for u in units_of(engine) if u.module is block)
    return {"block": spent(engine, lambda: write(block.parameters())), "padded": unit.layout.padded_numel * 4}


def test_writing_a_unit_costs_one_broadcast_more() -> None:
    for costs in run_ranks(2, _write_costs):
        calls, sizes = costs["block"]
        assert calls == {"all_gather": 1, "broadcast": 1, "all_reduce": 1}
        assert sizes["all_gather"] == sizes["broadcast"] == costs["padded"]


def _nest(stage: int) -> list[bool]:
    engine = make_engine(config(stage, micro=2))
    param, other = engine.module.head.weight, engine.module.position
    frozen = dict(engine.module.named_parameters())
    with GatheredParameters([param, other]):
        inside = param.detach().clone()
        with GatheredParameters([param], modifier_rank=0):
            param.data.add_(1.0)
        outer = param.detach().clone()
        values_stay = bool(torch.isfinite(other).all())
    with GatheredParameters(param):
        after = param.detach().clone()
    assert frozen["head.weight"] is param
    return [values_stay, torch.equal(after, inside + 1), stage != 3 or torch.equal(outer, inside + 1)]


def test_contexts_may_be_nested_over_one_parameter() -> None:
    for stage in (1, 3):
        for checks in run_ranks(2, _nest, stage):
            assert checks == [True, True, True]


def _raise(stage: int) -> tuple[bool, str]:
    engine = make_engine(config(stage, micro=2))
    before = full_parameters(engine)
    text = "nothing"
    try:
        with GatheredParameters(engine.module.parameters(), modifier_rank=0):
            engine.module.head.weight.data.fill_(5.0)
            if engine.global_rank == 1:
                raise KeyError("mine")
    except KeyError as error:
        text = str(error)
    unchanged = same(before, full_parameters(engine))
    train(engine, range(1), samples=2 * engine.world_size)
    return unchanged, text


@pytest.mark.parametrize("stage", [1, 3])
def test_where_one_rank_raises_no_rank_takes_anything_over(stage: int) -> None:
    results = run_ranks(2, _raise, stage)
    assert [text for _, text in results] == ["nothing", "'mine'"]
    assert all(unchanged for unchanged, _ in results)


def _forward_inside() -> list[bool]:
    engine = make_engine(config(3, micro=2))
    inputs, _ = batches(0, samples=2)
    with torch.no_grad():
        before = engine(inputs)
        with GatheredParameters(engine.module.parameters()):
            inside = [torch.equal(engine(inputs), before), torch.equal(engine.module(inputs), before)]
        with GatheredParameters(engine.module.head.weight, modifier_rank=0):
            engine.module.head.weight.data.zero_()
            inside.append(not bool(engine(inputs).any()))
        return [*inside, not bool(engine(inputs).any())]


def test_a_forward_inside_reads_the_values_of_the_context() -> None:
    assert run_ranks(2, _forward_inside) == [[True] * 4] * 2


def _again(stage: int) -> list[bool]:
    engine = make_engine(config(stage, micro=2))
    train(engine, range(2), samples=2 * engine.world_size)
    module, weights = engine.module, full_parameters(engine)
    last = weakref.ref(engine)
    engine.destroy()
    del engine
    gc.collect()
    return [
        last() is None,
        same(full_parameters(dsrun.initialize(model=module, config=config(3, micro=2))[0]), weights),
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_whose_engine_is_gone_has_its_values_for_the_next_one(stage: int) -> None:
    assert run_ranks(1, _again, stage) == [[True, True]]


def _frozen(stage: int) -> float:
    model = gpt()
    model.blocks[0].requires_grad_(False)
    engine = make_engine(config(stage, micro=2), model=model)
    weight = model.blocks[0].up.weight
    with GatheredParameters(weight, modifier_rank=1):
        weight.data.fill_(float(engine.global_rank))
    with GatheredParameters(weight):
        return float(weight.mean())


def test_frozen_parameters_take_the_modifiers_values_on_every_rank() -> None:
    for stage in (2, 3):
        assert run_ranks(2, _frozen, stage) == [1.0, 1.0]


@pytest.mark.parametrize("stage", STAGES)
def test_inside_a_forward_or_a_backward_it_is_refused(stage: int) -> None:
    engine = make_engine(config(stage, micro=2))
    block = engine.module.blocks[1]
    weight = block.up.weight
    inputs, _ = batches(0, samples=2)
    texts: list[str] = []

    def gather(*_: object) -> None:
        try:
            with GatheredParameters(weight):
                pass
        except ModelError as error:
            texts.append(str(error))

    handle = block.up.register_forward_hook(gather)
    output = engine(inputs)
    handle.remove()
    output.register_hook(gather)
    engine.backward(output.mean())
    assert texts == [
        f"GatheredParameters: called inside {where}, which reads the parameters"
        for where in ("the forward of `blocks.1`", "a backward")
    ]
    gather()
    assert len(texts) == 2
    shape = r"`head\.weight` was given the shape \(3,\)"
    with pytest.raises(ModelError, match=shape), GatheredParameters(engine.module.head.weight, modifier_rank=0):
        engine.module.head.weight.data = torch.zeros(3)
    assert engine.module.head.weight.shape == (61, 72)
    for rank in (-1, 1):
        context = GatheredParameters(engine.module.head.weight, modifier_rank=rank)
        with pytest.raises(ModelError, match=f"modifier_rank is {rank}; .* 0 to 0"), context:
            pass


def test_parameters_that_nobody_has_taken_over_are_left_alone() -> None:
    model = gpt()
    with GatheredParameters(model.parameters(), modifier_rank=0):
        model.head.weight.data.fill_(2.0)
    assert float(model.head.weight.detach()[0, 0]) == 2.0


# What scripts read of a parameter -------------------------------------------------------------------------------------


def _attributes() -> list[Any]:
    engine = make_engine(config(3, micro=2))
    param = engine.module.blocks[0].up.weight
    found: list[Any] = [param.ds_status]
    with GatheredParameters(param):
        found.append(param.ds_status)
    found.append(param.ds_status)

    def look(*_: object) -> None:
        found.append(param.ds_status)

    engine.module.blocks[0].up.register_forward_hook(look)
    with torch.no_grad():
        engine(batches(0, samples=2)[0])
    found.append(param.ds_status)
    pieces = [p.ds_tensor.numel() for p in engine.module.parameters()]
    ids = [p.ds_id for p in engine.module.parameters()]
    return [found, tuple(param.ds_shape), param.ds_numel, ids, sum(pieces)]


def test_ds_attributes_are_true_at_every_moment() -> None:
    there, gone = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
    ranks = run_ranks(2, _attributes)
    for found, shape, numel, ids, _ in ranks:
        assert found == [gone, there, gone, there, gone]
        assert shape == (217, 72)
        assert numel == 217 * 72
        assert ids == list(range(len(ids)))
    assert sum(rank[-1] for rank in ranks) == sum(p.numel() for p in gpt().parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_only_sharded_parameters_have_ds_attributes(stage: int) -> None:
    engine = make_engine(config(stage, micro=2))
    assert all(hasattr(p, "ds_id") == (stage == 3) == is_zero_param(p) for p in engine.module.parameters())
    assert all(isinstance(p, torch.nn.Parameter) for p in engine.module.parameters())


def _attributes_of_frozen() -> list[Any]:
    model = gpt()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("blocks.0"))
    engine = make_engine(config(3, micro=2), model=model)
    whole = [param for param in engine.module.parameters() if not is_zero_param(param)]
    found = [(param.ds_status, tuple(param.ds_shape), param.ds_numel, param.ds_tensor.numel()) for param in whole]
    kept = [type(copy.deepcopy(param)) is torch.nn.Parameter for param in whole]
    return [found, [(tuple(param.shape), param.numel()) for param in whole], kept]


def test_frozen_parameters_that_each_rank_has_whole_say_so() -> None:
    for found, shapes, kept in run_ranks(2, _attributes_of_frozen):
        assert found  # what has no trained parameter beside it is not cut
        assert found == [(ZeroParamStatus.AVAILABLE, shape, numel, numel) for shape, numel in shapes]
        assert all(kept)


def maybe_zero_3(param: Any) -> Tensor:
    """As LLaVA and its many copies write it, with another import."""
    from dsrun import zero
    from dsrun.runtime.zero.partition_parameters import ZeroParamStatus as Status

    if hasattr(param, "ds_id"):
        assert param.ds_status == Status.NOT_AVAILABLE
        with zero.GatheredParameters([param]):
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def _copied_code(stage: int) -> bool:
    engine = make_engine(config(stage, micro=2))
    return same({n: maybe_zero_3(p) for n, p in engine.module.named_parameters()}, full_parameters(engine))


@pytest.mark.parametrize("stage", [2, 3])
def test_code_copied_between_projects_finds_what_it_reads(stage: int) -> None:
    assert run_ranks(2, _copied_code, stage) == [True, True]


def test_a_sharded_parameter_can_be_copied_and_pickled(tmp_path: Any) -> None:
    import copy

    engine = make_engine(config(3, micro=2))
    param = engine.module.head.weight
    values = full_parameters(engine)["head.weight"]
    with GatheredParameters(param):
        twin = copy.deepcopy(param)
        torch.save(param, tmp_path / "param.pt")
    assert not is_zero_param(twin)
    assert torch.equal(twin, values)
    assert torch.equal(torch.load(tmp_path / "param.pt"), values)
    for copied, whole in ((copy.deepcopy, param), (pickle.dumps, param), (copy.deepcopy, engine.module.blocks[0])):
        with pytest.raises(ModelError, match="is copied or pickled while its values are on all ranks in pieces"):
            copied(whole)


# torch's own state dicts ----------------------------------------------------------------------------------------------


def _load(stage: int, bf16: bool) -> tuple[bool, list[str]]:
    engine = make_engine(config(stage, micro=2, bf16=bf16))
    other = gpt(seed=1).to(torch.bfloat16 if bf16 else torch.float32)
    refused: list[str] = []
    for part, call in {
        "all": lambda: engine.module.load_state_dict(other.state_dict()),
        "block": lambda: engine.module.blocks[0].load_state_dict(other.blocks[0].state_dict()),
        "state": lambda: engine.module.blocks[0].state_dict()["up.bias"].clone(),
    }.items():
        try:
            call()
        except ModelError:
            refused.append(part)
    with GatheredParameters(engine.module.parameters(), modifier_rank=0):
        if dsrun.init_distributed().rank == 0:
            engine.module.load_state_dict(other.state_dict())
    dtype = torch.bfloat16 if bf16 else torch.float32  # where forward reads the same as before, a master keeps its bits
    found = {name: value.to(dtype) for name, value in full_parameters(engine).items()}
    return same(found, {name: param.detach() for name, param in other.named_parameters()}), refused


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_is_loaded_inside_and_outside_only_where_parameters_are_whole(stage: int) -> None:
    for equal, refused in run_ranks(2, _load, stage, stage % 2 == 1):
        assert equal
        assert refused == (["all", "block", "state"] if stage == 3 else [])


def _load_outside(stage: int, bf16: bool, offload: bool) -> tuple[bool, list[float]]:
    settings = config(stage, micro=2, bf16=bf16)
    if offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = make_engine(settings)
    train(engine, range(2), samples=4)
    other = gpt(seed=1)
    engine.module.load_state_dict(other.state_dict())
    exact = same(full_parameters(engine), {name: param.detach() for name, param in other.named_parameters()})
    return exact, train(engine, range(2, 4), samples=4)


#: Stages, and whether the optimizer is in host memory.
_WAYS = ((0, False), (1, False), (2, False), (2, True))


@pytest.mark.parametrize(
    ("bf16", "ways"),
    [
        (False, (_WAYS[0], _WAYS[3])),
        (True, _WAYS),
        pytest.param(False, _WAYS, marks=pytest.mark.soak("all ways in bf16, and two of them")),
    ],
)
def test_masters_take_all_digits_of_a_state_dict(bf16: bool, ways: tuple[tuple[int, bool], ...]) -> None:
    losses: list[list[float]] = []
    for stage, offload in ways:
        for exact, found in run_ranks(2, _load_outside, stage, bf16, offload):
            assert exact, f"stage {stage}"
            losses.append(found)
    assert all(other == losses[0] for other in losses)
