"""Models built in slices: the values of an ordinary construction, and never more than a module whole on a rank."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import dsrun
from dsrun import zero
from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.errors import InputError, ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.zero.creation.construct import ConstructionBySlices
from dsrun.runtime.zero.creation.unbuilt import UnbuiltParameters
from dsrun.runtime.zero.partition_parameters import memory_of
from support.models import Block, TinyGPT
from support.ranks import run_ranks
from support.training import config, frozen_parameters, full_parameters, make_engine, train

CPU = torch.device("cpu")


class Drawn(TinyGPT):
    """Values come from constructors, from tensors of its own, and from a walk over everything at the end."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__(tied=tied)
        self.apply(self._draw)
        with torch.no_grad():
            self.blocks[0].up.weight[3].zero_()
            nn.init.ones_(self.blocks[1].down.bias)
            self.blocks[2].norm_1.weight.copy_(self.norm.weight + self.blocks[1].down.bias)  # several in one call
            self.norm.bias.copy_(self.blocks[2].norm_1.weight)
        self.head.requires_grad_(tied)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()


def ordinary(tied: bool, *, seed: int = 7) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: param.detach() for name, param in Drawn(tied=tied).named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _built(stage: int, tied: bool) -> list[Any]:
    info = dsrun.init_distributed()
    torch.manual_seed(7 + info.rank)  # rank 0's values count
    with zero.Init():
        model = Drawn(tied=tied)
    held = sum(param.untyped_storage().nbytes() for param in model.parameters())
    early = next(model.parameters()).ds_status  # type: ignore[attr-defined]
    params = list(model.parameters())  # ranks may name them in any order: out of a set, say
    with zero.GatheredParameters(params[info.rank :] + params[: info.rank]):
        whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    with zero.GatheredParameters(model.norm.weight, modifier_rank=info.world_size - 1):
        model.norm.weight.data.fill_(1.0 + info.rank)
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
    engine = dsrun.initialize(model=model, config=config(stage, micro=2))[0]
    assert all(hasattr(p, "ds_id") == (stage == 3) for p in model.parameters())
    weights = {**full_parameters(engine), **frozen_parameters(engine)}
    losses = train(engine, range(2), samples=2 * engine.world_size)
    return [held, early, whole, weights, losses, shapes]


@pytest.mark.parametrize(("world_size", "stage", "tied"), [(1, 3, False), (3, 3, True), (2, 0, False), (2, 2, True)])
def test_values_are_those_of_an_ordinary_construction_bit_for_bit(world_size: int, stage: int, tied: bool) -> None:
    expected = ordinary(tied)
    results = run_ranks(world_size, _built, stage, tied)
    for held, early, whole, weights, losses, shapes in results:
        assert held == 4 * len(expected), "one element a parameter, until it is gathered"
        assert early is zero.ZeroParamStatus.NOT_AVAILABLE
        assert same(whole, expected)
        assert torch.equal(weights.pop("norm.weight"), torch.full((72,), float(world_size)))
        assert same(weights, {name: value for name, value in expected.items() if name != "norm.weight"})
        assert losses == results[0][4]
        assert shapes == {
            name: (tuple(value.shape), value.dtype) for name, value in Drawn(tied=tied).state_dict().items()
        }


def test_no_more_than_one_module_is_whole_at_a_time() -> None:
    width, layers = 64, 6
    made: list[nn.Parameter] = []
    whole: list[int] = []

    def look(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        made.extend([] if param is None else [param])
        with torch._C.DisableTorchFunction():  # to look is not to touch
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in made}
        whole.append(sum(storages.values()))

    def build() -> nn.Module:
        model = nn.ModuleDict({"blocks": nn.ModuleList(Block(width, 4) for _ in range(layers))})
        model.apply(lambda m: m.weight.data.normal_() if isinstance(m, nn.Linear) else None)
        look(model, "", None)
        return model

    def body(collectives: LoopbackCollectives) -> tuple[nn.Module, int, dict[str, int]]:
        with ConstructionBySlices(UnbuiltParameters(collectives, device=CPU)):
            model = build()
        kept = sum(p.ds_tensor.untyped_storage().nbytes() for p in model.parameters())  # type: ignore[attr-defined]
        return model, kept, dict(collectives.traffic.calls)

    handle = register_module_parameter_registration_hook(look)
    try:
        build()
        assert max(whole) >= layers * 10 * width * width * 4, "an ordinary construction holds everything"
        made.clear()
        whole.clear()
        ((_, kept, calls),) = LoopbackWorld(1).run(body)
    finally:
        handle.remove()
    largest_module = (3 * width + 1) * (width + 1) * 4
    assert max(whole) <= largest_module + 4 * len(made), "one module, and one element of each other parameter"
    assert kept == sum(p.numel() * 4 for p in made)
    assert calls["broadcast"] == len(made) + 4 * layers, "each parameter once, and each that was drawn again"
    assert calls["all_gather"] == 4 * layers


def test_a_cast_of_the_whole_model_is_kept() -> None:
    expected = {name: value.bfloat16().float() for name, value in ordinary(True).items()}
    torch.manual_seed(7)
    with zero.Init():
        model = Drawn(tied=True)
    model.bfloat16()
    with zero.GatheredParameters(model.norm.weight):
        assert model.norm.weight.dtype == torch.bfloat16
    engine = dsrun.initialize(model=model, config=config(3, micro=2, bf16=True))[0]
    assert same(full_parameters(engine), expected)


def test_a_parameter_written_to_while_it_is_sharded_keeps_what_was_written() -> None:
    with zero.Init():
        model = TinyGPT()
    model.norm.bias.data.fill_(3.0)
    nn.init.constant_(model.head.weight, 0.25)
    model.blocks[0].up.weight.data[1] = 2.0
    engine = make_engine(config(3, micro=2), model=model)
    values = full_parameters(engine)
    assert bool((values["norm.bias"] == 3.0).all())
    assert bool((values["head.weight"] == 0.25).all())
    assert bool((values["blocks.0.up.weight"][1] == 2.0).all())
    assert bool((values["blocks.0.up.weight"][0] != 2.0).all())


def test_a_copy_of_a_parameter_whose_values_are_elsewhere_is_refused() -> None:
    with zero.Init():
        original = TinyGPT()
    with pytest.raises(ModelError, match="is a copy of a sharded parameter"):
        make_engine(config(3, micro=2), model=copy.deepcopy(original))


def _copied_by_a_script_for_deepspeed() -> list[bool]:
    os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    torch.manual_seed(7)
    with zero.Init():
        model = TinyGPT()
    torch.manual_seed(7)
    plain = TinyGPT()
    head = copy.deepcopy(model.head)  # as PEFT copies what it trains beside adapters, unless a weight has no elements
    found = [type(head.weight) is nn.Parameter, torch.equal(head.weight, plain.head.weight)]
    model.head = head
    engine = make_engine(config(3, micro=2), model=model)
    found.append(same(full_parameters(engine), {name: param.detach() for name, param in plain.named_parameters()}))
    block = copy.deepcopy(engine.module.blocks[1])
    found.append(same(dict(block.named_parameters()), dict(plain.blocks[1].named_parameters())))
    with pytest.raises(ModelError, match="is copied or pickled while its values are on all ranks in pieces"):
        pickle.dumps(engine.module.head.weight)  # which scripts do on one rank alone
    return found


def test_scripts_for_deepspeed_copy_a_module_whose_values_are_elsewhere() -> None:
    assert run_ranks(2, _copied_by_a_script_for_deepspeed) == [[True] * 4] * 2


def test_slices_of_all_ranks_are_the_parameter_once() -> None:
    def body(collectives: LoopbackCollectives) -> list[Tensor]:
        parameter = nn.Parameter(torch.arange(7.0) + 100 * collectives.rank)
        empty = nn.Parameter(torch.zeros(0, 3))
        nursery = UnbuiltParameters(collectives, device=CPU)
        nursery.take([("seven", parameter), ("empty", empty)])
        assert empty.shape == (0, 3)
        assert parameter.shape == (7,)
        assert bool(memory_of(parameter).isnan().all())
        assert torch.equal(parameter.detach().clone(), torch.arange(7.0)), "rank 0's, asked of all"
        return [parameter.ds_tensor.clone(), empty.ds_tensor]  # type: ignore[attr-defined]

    ranks = LoopbackWorld(3).run(body)
    assert torch.cat([pieces[0] for pieces in ranks]).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert all(pieces[1].numel() == 0 for pieces in ranks)


def test_contexts_may_be_nested_and_leave_nothing_behind() -> None:
    torch.manual_seed(7)
    with zero.Init():
        with zero.Init():
            inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
        outer = nn.Linear(2, 3)
        assert zero.is_zero_param(inner[0].weight)
    assert zero.is_zero_param(outer.weight)
    assert not zero.is_zero_param(nn.Sequential(nn.Linear(2, 3))[0].weight)
    with pytest.raises(TypeError), zero.Init():
        nn.Sequential(nn.Linear(2, 3), "no module")  # type: ignore[arg-type]
    assert not zero.is_zero_param(nn.Sequential(nn.Linear(2, 3))[0].weight)


def test_arguments_decide_what_is_cut_and_what_is_not_taken_is_refused() -> None:
    for arguments in ({"enabled": False}, {"config_dict_or_path": config(2, micro=2)}, {"config": config(1, micro=2)}):
        with zero.Init(**arguments):  # type: ignore[arg-type]
            assert not zero.is_zero_param(nn.Sequential(nn.Linear(2, 3))[0].weight)
    existing = nn.Linear(2, 3)
    zero.Init(module=existing, config_dict_or_path=config(3, micro=2), dtype=torch.bfloat16)
    assert zero.is_zero_param(existing.weight)
    assert existing.weight.dtype == torch.bfloat16
    unresolved = {**config(3, micro=2), "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    with zero.Init(config_dict_or_path=unresolved):
        assert zero.is_zero_param(nn.Sequential(nn.Linear(2, 3))[0].weight)
    for arguments in ({"mpu": 1}, {"remote_device": "nvme"}, {"data_parallel_group": 1}):
        with pytest.raises(InputError, match=next(iter(arguments))):
            zero.Init(**arguments)  # type: ignore[arg-type]


USES: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "clone": lambda value, state: value.clone(),
    "to a device": lambda value, state: value.to("cpu"),
    "arithmetic": lambda value, state: value + 1,
    "an element": lambda value, state: float(value[0, 0]),
    "an address": lambda value, state: value.data_ptr(),
    "into another tensor": lambda value, state: torch.zeros(4, 3).copy_(value),
    "in a list": lambda value, state: torch.cat([torch.zeros(1, 3), value]),
    "a parameter of it": lambda value, state: nn.Parameter(value),
    "torch.save": lambda value, state: torch.save(state, io.BytesIO()),
    "safetensors": lambda value, state: save(state),
    "a deep copy": lambda value, state: copy.deepcopy(state),
    "numpy": lambda value, state: value.numpy(),
}


@pytest.mark.parametrize("engine", [False, True])
def test_a_state_dict_has_shapes_and_refuses_values_that_are_elsewhere_by_name(engine: bool) -> None:
    with zero.Init():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    if engine:
        make_engine(config(3, micro=2), model=model)
    state = model.state_dict()
    assert {name: (tuple(v.shape), v.dtype, v.numel(), v.is_meta) for name, v in state.items()} == {
        "0.weight": ((4, 3), torch.float32, 12, True),
        "0.bias": ((4,), torch.float32, 4, True),
        "1.weight": ((5, 4), torch.float32, 20, True),
        "1.bias": ((5,), torch.float32, 5, True),
    }
    assert "`0.weight` of Linear.state_dict()" in str(state["0.weight"])
    for use, body in USES.items():
        with pytest.raises(ModelError, match=r"`[01]\.\w+` of Linear\.state_dict\(\) is sharded"):
            raise AssertionError(f"{use} got {body(state['0.weight'], state)}")
    with pytest.raises(RuntimeError, match="is sharded"):
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).load_state_dict(state)
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight
    with zero.GatheredParameters(model[0].parameters()):
        assert bool(model.state_dict()["0.weight"].clone().isfinite().all())


def _initialized(stage: int, *, inside: bool) -> list[Any]:
    info = dsrun.init_distributed()
    torch.manual_seed(7 + (info.rank if inside else 0))  # rank 0's values count
    with zero.Init(enabled=inside):
        model = Drawn()
        model.position.requires_grad_(False)  # whole on every rank, and the root's own: nobody has cut it yet
        engine = dsrun.initialize(model=model, config=config(stage, micro=2))[0]
        losses = train(engine, range(2), samples=2 * engine.world_size)
        later = nn.Sequential(nn.Linear(2, 3))
    assert zero.is_zero_param(later[0].weight) == inside
    losses += train(engine, range(2, 3), samples=2 * engine.world_size)
    return [losses, {**full_parameters(engine), **frozen_parameters(engine)}]


def _inside_and_outside() -> list[list[Any]]:
    return [_initialized(stage, inside=True) + _initialized(stage, inside=False) for stage in (0, 1, 2, 3)]


def test_initialize_inside_the_context_is_as_outside_at_every_stage() -> None:
    for rank in run_ranks(2, _inside_and_outside):
        for losses, weights, expected_losses, expected in rank:
            assert losses == expected_losses
            assert same(weights, expected)


# The meta device ------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """All values come from `reset_parameters` of its modules."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 72)
        self.blocks = nn.ModuleList(Block(72, 4) for _ in range(layers))
        self.attention = nn.MultiheadAttention(72, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(72, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.attention(x, x, x, need_weights=False)[0]))


def _from_meta(stage: int, bf16: bool) -> list[Any]:
    with torch.device("meta"):
        model = Plain()
    identities = [id(p) for p in model.parameters()]
    engine = make_engine(config(stage, micro=2, bf16=bf16), model=model)
    weights = full_parameters(engine)
    variance = model.norm.running_var.clone().float()
    losses = train(engine, range(2), samples=2 * engine.world_size)
    return [identities == [id(p) for p in model.parameters()], weights, variance, losses]


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (2, True), (3, False), (3, True)])
def test_a_meta_model_gets_the_values_of_an_ordinary_construction(stage: int, bf16: bool) -> None:
    torch.manual_seed(7)
    model = Plain()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for identities, weights, variance, losses in run_ranks(2, _from_meta, stage, bf16):
        assert identities
        assert same(weights, expected)
        assert bool((variance == 1).all())
        assert all(loss == loss for loss in losses)


def test_meta_tensors_that_nobody_fills_are_named_all_at_once() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.empty(3))
            self.register_buffer("table", torch.empty(4))

    class Forgets(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)

    with torch.device("meta"):
        lazy, forgets = Lazy(), nn.Sequential(Forgets(3, 3))
    with pytest.raises(ModelError) as caught:
        make_engine(config(3, micro=2), model=lazy)
    assert [problem.message for problem in caught.value.problems] == [
        f"model: `{name}` is on the meta device, and Lazy has no reset_parameters" for name in ("scale", "table")
    ]
    with pytest.raises(ModelError, match=r"`0\.bias` was on the meta device, and Forgets's reset_parameters does not"):
        make_engine(config(3, micro=2), model=forgets)
