"""The memory-efficient linear gives the bits of torch's, and keeps no copy of a weight; both are counted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dsrun.runtime.precision.linear import (
    MemoryEfficientLinear,
    memory_efficient_linear,
    use_memory_efficient_linear,
)
from support.inside_engine import store_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

Linear = Callable[..., Tensor]
INPUTS: dict[str, Callable[[], Tensor]] = {
    "1-d": lambda: torch.randn(24),
    "2-d": lambda: torch.randn(6, 24),
    "2-d, transposed": lambda: torch.randn(24, 6).t(),
    "3-d": lambda: torch.randn(3, 5, 24),
    "3-d, not contiguous": lambda: torch.randn(5, 3, 24).transpose(0, 1),
    "3-d, expanded": lambda: torch.randn(1, 5, 24).expand(3, 5, 24),
    "4-d": lambda: torch.randn(2, 3, 5, 24),
    "4-d, not contiguous": lambda: torch.randn(2, 5, 3, 24).transpose(1, 2),
    "no rows": lambda: torch.randn(0, 24),
    "one row": lambda: torch.randn(1, 1, 24),
}


def autocast(dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _run(
    linear: Linear, make: Callable[[], Tensor], *, bias: bool, trained: bool, needs_x: bool, dtype: torch.dtype | None
) -> list[Tensor | None]:
    torch.manual_seed(3)
    x = make().detach().requires_grad_(needs_x)
    weight = nn.Parameter(torch.randn(40, 24), requires_grad=trained)
    offset = nn.Parameter(torch.randn(40), requires_grad=trained) if bias else None
    with autocast(dtype):
        y = linear(x, weight, offset)
    (y.float() * torch.randn(y.shape)).sum().backward()
    return [y.detach(), x.grad, weight.grad, None if offset is None else offset.grad]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("trained", "needs_x"), [(True, True), (True, False), (False, True)])
def test_output_and_gradients_have_torchs_bits(
    dtype: torch.dtype | None, bias: bool, trained: bool, needs_x: bool
) -> None:
    options: dict[str, Any] = {"bias": bias, "trained": trained, "needs_x": needs_x, "dtype": dtype}
    for shape, make in INPUTS.items():
        expected, found = (_run(linear, make, **options) for linear in (F.linear, memory_efficient_linear))
        for name, theirs, ours in zip(("y", "x", "weight", "bias"), expected, found, strict=True):
            assert (theirs is None) == (ours is None), f"{shape}: {name}"
            if theirs is not None and ours is not None:
                assert ours.dtype == theirs.dtype, f"{shape}: {name}"
                assert torch.equal(ours, theirs), f"{shape}: {name}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_that_autocast_leaves_as_they_are_are_left_as_they_are(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 24, dtype=dtype), nn.Parameter(torch.randn(8, 24, dtype=dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = memory_efficient_linear(x, weight)
    assert y.dtype == dtype
    assert torch.equal(y, F.linear(x, weight))


def test_second_derivatives_are_torchs_but_for_rounding() -> None:
    found: list[Tensor] = []
    for linear in (F.linear, memory_efficient_linear):
        torch.manual_seed(3)
        x, weight = torch.randn(6, 24, requires_grad=True), nn.Parameter(torch.randn(40, 24))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = linear(x, weight)
        (grad,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), weight)
        found.append(second)
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0.01 * float(found[0].abs().max()))


def test_inside_a_transform_it_is_torchs_own() -> None:
    x, weight = torch.randn(4, 5), torch.randn(3, 5)
    with autocast(torch.bfloat16):
        found = torch.func.vmap(torch.func.grad(lambda row: memory_efficient_linear(row, weight).square().sum()))(x)
        expected = torch.func.vmap(torch.func.grad(lambda row: F.linear(row, weight).square().sum()))(x)
    assert torch.equal(found, expected)


@contextmanager
def counting(model: nn.Module) -> Generator[list[int]]:
    """Counts the bytes that are saved for backward, parameters themselves left out, and each memory once."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    held: dict[int, Tensor] = {}
    saved = [0]

    def put(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in params and place not in held:
            held[place] = tensor.detach()
            saved[0] += tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(put, lambda tensor: tensor):
        yield saved


def test_what_is_saved_is_the_input_and_no_copy_of_a_weight() -> None:
    width, depth, rows = 64, 4, 8
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    found: list[int] = []
    for _ in range(2):
        with counting(model) as saved, torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(rows, width, requires_grad=True))
        found.append(saved[0])
        use_memory_efficient_linear(model)
    inputs, copies = 2 * depth * rows * width, 2 * depth * width * width
    assert found == [inputs + copies, inputs]


def test_evaluation_leaves_no_copies_in_autocasts_cache() -> None:
    casts: list[int] = []
    for replaced in (False, True):
        first_layer = nn.Linear(16, 16)
        model = nn.Sequential(first_layer, nn.Linear(16, 16))
        if replaced:
            use_memory_efficient_linear(model)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            first = model(torch.ones(2, 16))
            first_layer.weight.mul_(2)  # a cached copy does not see it
            casts.append(int(not torch.equal(model(torch.ones(2, 16)), first)))
    assert casts == [0, 1]


def test_only_plain_linear_layers_are_replaced_and_stay_what_they_were() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"plain": nn.Linear(4, 4), "own": Own(4, 4), "attention": nn.MultiheadAttention(4, 1)})
    weight, names = model["plain"].weight, list(model.state_dict())
    assert use_memory_efficient_linear(model) == 1
    assert use_memory_efficient_linear(model) == 0
    assert isinstance(model["plain"], MemoryEfficientLinear)
    assert type(model["own"]) is Own
    assert model["plain"].weight is weight
    assert list(model.state_dict()) == names
    for twin in (copy.deepcopy(model["plain"]), pickle.loads(pickle.dumps(model["plain"]))):
        assert torch.equal(twin(torch.ones(2, 4)), model["plain"](torch.ones(2, 4)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_is_recomputed_with_the_same_bits(reentrant: bool) -> None:
    found: list[list[Tensor]] = []
    for replaced in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        if replaced:
            use_memory_efficient_linear(model)
        x = torch.randn(3, 24, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(model, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        y.float().square().sum().backward()
        assert x.grad is not None
        found.append([x.grad, *(param.grad for param in model.parameters() if param.grad is not None)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def _settings(stage: int, *, efficient: bool, **more: Any) -> dict[str, Any]:
    settings = config(stage, micro=2, torch_autocast={"enabled": True}, **more)
    settings["zero_optimization"]["memory_efficient_linear"] = efficient
    return settings


def _model() -> nn.Module:
    torch.manual_seed(7)
    model = TinyGPT(width=20, layers=3)
    dict(model.named_parameters())["blocks.1.up.weight"].requires_grad_(False)
    return model


def _train(cases: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor], int]]:
    found: list[tuple[list[float], dict[str, Tensor], int]] = []
    for case in cases:
        engine = make_engine(case, model=_model())
        if case["zero_optimization"]["stage"] == 3:
            store_of(engine).poison = True
        count = sum(isinstance(module, MemoryEfficientLinear) for module in engine.module.modules())
        found.append((train(engine, range(2), samples=4), full_parameters(engine), count))
    return found


def test_at_stage_3_it_reads_the_gathered_weight_and_changes_no_bit() -> None:
    recompute = {"activation_checkpointing": {"policy": "every_block"}}
    cases = [
        _settings(2, efficient=True),
        _settings(3, efficient=False),
        _settings(3, efficient=True),
        _settings(3, efficient=True, **recompute),
    ]
    for results in run_ranks(2, _train, cases):
        losses, weights, _ = results[0]
        assert [count for _, _, count in results] == [0, 0, 3 * 4 + 1, 3 * 4 + 1]
        for found, of_case, _ in results[1:]:
            assert found == losses
            assert all(torch.equal(of_case[name], value) for name, value in weights.items())


def test_without_autocast_nothing_is_replaced() -> None:
    engine = make_engine(config(3, micro=2), model=_model())
    assert not any(isinstance(module, MemoryEfficientLinear) for module in engine.module.modules())
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets))
