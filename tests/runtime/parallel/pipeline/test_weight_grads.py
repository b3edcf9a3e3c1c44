"""Backwards in two halves give the bits of torch's own backward, and keep nothing."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.errors import ModelError
from dsrun.runtime.activation.activate import activate
from dsrun.runtime.activation.recompute.rng import RngTracker
from dsrun.runtime.parallel.pipeline.weight_grads import DeferredWeightGrads


class Block(nn.Module):
    """Layers of all kinds: with and without bias, one called twice, a norm between them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.twice = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return self.twice(torch.tanh(self.twice(x)))


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(blocks))).to(dtype)


def inputs_of(shape: Sequence[int], dtype: torch.dtype = torch.float32, micros: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(micros)]


def plain_grads(model: nn.Module, micros: Sequence[Tensor], run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Returns the gradients of the inputs by torch alone; those of parameters are in the model."""
    found: list[Tensor] = []
    for micro in micros:
        x = micro.clone().requires_grad_()
        run(model, x).float().square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


def split_grads(model: nn.Module, micros: Sequence[Tensor], run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Returns them with backwards in two halves: all forwards, all first halves, all second ones."""
    deferred = DeferredWeightGrads(model)
    leaves = [micro.clone().requires_grad_() for micro in micros]
    losses = [run(model, x).float().square().sum() for x in leaves]
    for number, loss in enumerate(losses):
        with deferred.deferring(0, number):
            loss.backward()
    for number in range(len(losses)):
        deferred.run(0, number)
    assert deferred.queued_bytes == 0
    deferred.remove()
    return [x.grad for x in leaves if x.grad is not None]


def assert_same(split: nn.Module, plain: nn.Module) -> None:
    names = dict(plain.named_parameters())
    for name, param in split.named_parameters():
        expected = names[name].grad
        if expected is None:
            assert param.grad is None, name
            continue
        assert param.grad is not None, name
        assert param.grad.dtype == expected.dtype
        assert torch.equal(param.grad, expected), name


def call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def recomputed(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.children():
        x = checkpoint(block, x, use_reentrant=False)
    return x


def transposed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.transpose(0, 1))


RUNS = {"plainly": call, "autocast": under_autocast, "recomputed": recomputed, "transposed": transposed}


SHAPES = ((24,), (1, 24), (5, 24), (2, 17, 24), (2, 3, 4, 24), (0, 24))
DTYPES = (torch.float32, torch.bfloat16)
#: Autocast is for fp32 weights, and there is nothing to transpose in less than three dimensions.
CASES = [
    pytest.param(run, shape, dtype, id=f"{name}-{shape}-{dtype}".replace("torch.", ""))
    for name, run in RUNS.items()
    for shape in SHAPES
    for dtype in DTYPES
    if not (run is transposed and len(shape) < 3) and not (run is under_autocast and dtype is not torch.float32)
]


@pytest.mark.parametrize(("run", "shape", "dtype"), CASES)
def test_two_halves_give_the_bits_of_one_backward(
    run: Callable[[nn.Module, Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model = model_of(dtype=dtype)
    twin = copy.deepcopy(model)
    micros = inputs_of(shape, dtype)
    expected = plain_grads(twin, micros, run)
    found = split_grads(model, micros, run)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert_same(model, twin)


@pytest.mark.parametrize("bias", [True, False])
def test_inputs_laid_out_by_columns_give_the_bits_of_one_backward(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(33, 19, bias=bias)
    twin = copy.deepcopy(layer)
    micros = inputs_of((33, 65))

    def run(module: nn.Module, x: Tensor) -> Tensor:
        return module(x.t())

    expected = plain_grads(twin, micros, run)
    found = split_grads(layer, micros, run)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert_same(layer, twin)


def test_a_weight_stored_by_columns_gets_the_bits_of_one_backward() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(33, 19)
    layer.weight = nn.Parameter(torch.randn(33, 19).t())
    twin = copy.deepcopy(layer)
    micros = inputs_of((65, 33))
    expected = plain_grads(twin, micros, call)
    found = split_grads(layer, micros, call)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert_same(layer, twin)


def test_convolutions_of_gpt2_get_the_bits_of_one_backward() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model = nn.Sequential(pytorch_utils.Conv1D(48, 24), nn.GELU(), pytorch_utils.Conv1D(24, 48))
    twin = copy.deepcopy(model)
    micros = inputs_of((2, 17, 24))
    expected = plain_grads(twin, micros, call)
    deferred = DeferredWeightGrads(model)
    with deferred.deferring(0, 0):
        model(micros[0]).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    deferred.forget()
    deferred.remove()
    found = split_grads(model, micros, call)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert_same(model, twin)


def test_blocks_that_dsrun_recomputes_get_the_bits_of_one_backward() -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    micros = inputs_of((2, 17, 24))
    section = ActivationCheckpointing.model_validate({"policy": "every_block"})
    assert activate(model, section, skip=lambda _: False, script_chooses=False, tracker=RngTracker(), say=print)
    expected = plain_grads(twin, micros, call)
    found = split_grads(model, micros, call)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert_same(model, twin)


def test_only_norms_and_embeddings_get_gradients_in_the_first_half() -> None:
    model = model_of(blocks=1)
    deferred = DeferredWeightGrads(model)
    (x,) = inputs_of((2, 17, 24), micros=1)
    with deferred.deferring(0, 0):
        model(x).sum().backward()
    assert {name for name, param in model.named_parameters() if param.grad is not None} == {
        "0.norm.weight",
        "0.norm.bias",
    }
    # The input of `up` is [34, 24], that of `down` [34, 72], those of `twice` [34, 24] twice; gradients have the
    # shapes of the outputs. `down` makes the gradient of a sum, which the second input of it shares.
    numel = 34 * (24 + 72 + 24 + 24) + 34 * (72 + 24 + 24 + 24)
    assert 0.9 * 4 * numel <= deferred.queued_bytes <= 4 * numel
    deferred.run(0, 0)
    assert deferred.queued_bytes == 0
    assert all(param.grad is not None for param in model.parameters())


def test_outside_of_deferring_all_gradients_come_at_once() -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    micros = inputs_of((2, 17, 24))
    deferred = DeferredWeightGrads(model)
    plain_grads(model, micros, call)
    assert deferred.queued_bytes == 0
    plain_grads(twin, micros, call)
    assert_same(model, twin)


def test_gradients_are_added_in_place_to_what_is_attached() -> None:
    model = model_of(blocks=1)
    twin = copy.deepcopy(model)
    deferred = DeferredWeightGrads(model)
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    views = [view.view_as(param) for view, param in zip(flat.split([p.numel() for p in params]), params, strict=True)]
    micros = inputs_of((2, 17, 24))

    def attach(values: Sequence[Tensor | None]) -> None:
        for param, value in zip(params, values, strict=True):
            param.grad = value

    for number, micro in enumerate(micros):
        attach(views)
        with deferred.deferring(0, number):
            model(micro).square().sum().backward()
        attach([None] * len(params))
    for number in range(len(micros)):
        attach(views)
        deferred.run(0, number)
        assert all(param.grad is view for param, view in zip(params, views, strict=True))
        attach([None] * len(params))
    for micro in micros:
        twin(micro).square().sum().backward()
    assert torch.equal(flat, torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]))


def test_frozen_weights_and_inputs_without_gradient_need_nothing() -> None:
    model = model_of()
    model[0].up.weight.requires_grad_(False)
    model[1].up.bias.requires_grad_(False)
    model[1].twice.requires_grad_(False)
    twin = copy.deepcopy(model)
    (x,) = inputs_of((2, 17, 24), micros=1)
    deferred = DeferredWeightGrads(model)
    with deferred.deferring(2, 5):
        model(x).sum().backward()
    deferred.run(2, 5)
    twin(x).sum().backward()
    assert_same(model, twin)


def test_two_layers_of_one_weight_get_the_sum_of_their_gradients() -> None:
    model = model_of()
    model[1].up.weight = model[0].up.weight
    twin = copy.deepcopy(model)
    micros = inputs_of((2, 17, 24))
    plain_grads(twin, micros, call)
    split_grads(model, micros, call)
    assert_same(model, twin)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_of_hugging_face_get_the_bits_of_one_backward(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=64, n_positions=16)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
        )
    model = transformers.AutoModelForCausalLM.from_config(config)
    twin = copy.deepcopy(model)
    micros = [torch.randint(64, (2, 12)) for _ in range(3)]
    for ids in micros:
        twin(input_ids=ids, labels=ids).loss.backward()
    deferred = DeferredWeightGrads(model)
    losses = [model(input_ids=ids, labels=ids).loss for ids in micros]
    for number, loss in enumerate(losses):
        with deferred.deferring(0, number):
            loss.backward()
    assert deferred.queued_bytes > 0
    for number in range(len(losses)):
        deferred.run(0, number)
    assert_same(model, twin)
    assert set(deferred.left) == ({"lm_head"} if family == "gpt2" else set())


class Tied(nn.Module):
    """A head that has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.block = Block()
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


def test_a_layer_that_shares_its_weight_with_another_kind_is_left_and_named() -> None:
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    deferred = DeferredWeightGrads(model)
    assert deferred.left == {"head": "its weight belongs to a Embedding too"}
    micros = [torch.arange(12).view(2, 6) + shift for shift in range(3)]
    losses = [model(tokens).square().sum() for tokens in micros]
    for number, loss in enumerate(losses):
        with deferred.deferring(0, number):
            loss.backward()
    for number in range(len(losses)):
        deferred.run(0, number)
    for tokens in micros:
        twin(tokens).square().sum().backward()
    assert_same(model, twin)


class Reads(nn.Module):
    """A layer that is called, and its weight used by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.layer.weight


def test_a_weight_used_outside_of_its_layer_too_is_refused_by_name() -> None:
    model = Reads()
    deferred = DeferredWeightGrads(model)
    (x,) = inputs_of((5, 24), micros=1)
    loss = model(x).sum()
    with pytest.raises(ModelError, match="`layer` is used outside"), deferred.deferring(0, 0):
        loss.backward()
    assert deferred.queued_bytes == 0


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    model = model_of()
    deferred = DeferredWeightGrads(model)
    (x,) = inputs_of((5, 24), micros=1)
    leaf = x.clone().requires_grad_()

    def fail(_grad: Tensor) -> Tensor:
        raise ValueError("a hook of the script")

    leaf.register_hook(fail)
    loss = model(leaf).sum()
    with pytest.raises(ValueError, match="a hook of the script"), deferred.deferring(0, 0):
        loss.backward()
    assert deferred.queued_bytes == 0
    with deferred.deferring(0, 0):
        model(x).sum().backward()
    deferred.forget()
    assert deferred.queued_bytes == 0


def test_a_hook_on_a_weight_sees_its_gradient_in_the_first_half() -> None:
    model = model_of()
    twin = copy.deepcopy(model)

    def triple(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(3)

    for each in (model, twin):
        each[0].up.weight.register_hook(lambda grad: 2 * grad)
        each[1].up.weight.register_post_accumulate_grad_hook(triple)
    micros = inputs_of((2, 17, 24))
    plain_grads(twin, micros, call)
    split_grads(model, micros, call)
    assert_same(model, twin)


def test_a_backward_to_be_differentiated_is_refused_by_name() -> None:
    model = model_of()
    deferred = DeferredWeightGrads(model)
    (x,) = inputs_of((5, 24), micros=1)
    leaf = x.clone().requires_grad_()
    with pytest.raises(ModelError, match="create_graph"), deferred.deferring(0, 0):
        torch.autograd.grad(model(leaf).sum(), [leaf, *model.parameters()], create_graph=True)


def test_outside_of_deferring_a_backward_can_be_differentiated() -> None:
    model = model_of(blocks=1)
    twin = copy.deepcopy(model)
    DeferredWeightGrads(model)
    (x,) = inputs_of((5, 24), micros=1)
    for each in (model, twin):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(each(leaf).sum(), leaf, create_graph=True)
        grad.square().sum().backward()
    for name, param in model.named_parameters():
        expected = twin.get_parameter(name).grad
        assert (param.grad is None) == (expected is None), name
        if expected is not None:
            assert param.grad is not None
            torch.testing.assert_close(param.grad, expected)


def test_results_can_be_changed_in_place() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 24)
    twin = copy.deepcopy(layer)
    micros = inputs_of((2, 17, 24))

    def run(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).relu_()

    plain_grads(twin, micros, run)
    split_grads(layer, micros, run)
    assert_same(layer, twin)


def test_memory_goes_with_the_second_half() -> None:
    model = model_of()
    deferred = DeferredWeightGrads(model)
    (x,) = inputs_of((2, 17, 24), micros=1)

    def alive() -> int:
        gc.collect()
        return sum(1 for each in gc.get_objects() if isinstance(each, Tensor))

    counts: list[int] = []
    for update in range(4):
        for number in range(3):
            with deferred.deferring(0, number):
                model(x).sum().backward()
        for number in range(3):
            deferred.run(0, number)
        if update:
            counts.append(alive())
    assert counts[2] <= counts[1]


def test_names_and_copies_are_those_of_the_model_without_it() -> None:
    model = model_of()
    before = [name for name, _ in model.named_modules()], list(model.state_dict())
    deferred = DeferredWeightGrads(model)
    assert ([name for name, _ in model.named_modules()], list(model.state_dict())) == before
    (x,) = inputs_of((5, 24), micros=1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with deferred.deferring(0, 0):
            other(x).sum().backward()
        assert deferred.queued_bytes == 0
        assert all(param.grad is not None for param in other.parameters())
        assert all(param.grad is None for param in model.parameters())
        deferred.run(0, 0)
    deferred.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_subclass_with_its_own_forward_is_not_touched() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Scaled(4, 4))
    DeferredWeightGrads(model)
    assert "forward" not in model[0].__dict__
