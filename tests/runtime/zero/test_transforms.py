"""`torch.func` inside forward: plain torch's losses, bit for bit, at every stage, with slots that others take over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import dsrun
from dsrun.errors import ModelError
from support.inside_engine import store_of
from support.ranks import run_ranks

WIDTH = 8
STEPS = 3
Forward = Callable[["Stack", Tensor], Tensor]


class Block(nn.Module):
    """A block, which is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Inside(Block):
    """A block that transforms what is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + vmap(grad(lambda row: self.up(row).tanh().sum()))(x)


class Stack(nn.Module):
    """Blocks between two layers, and a forward that is given."""

    def __init__(self, how: Forward, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)
        self.how = how

    def through(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters as attributes, which at stage 3 are read where they are wanted."""
    return {name: module.get_parameter(name) for name, _ in module.named_parameters()}


def end(model: Stack, x: Tensor) -> Tensor:
    return model.out(x).square().mean()


def own_parameters(model: Stack, x: Tensor) -> Tensor:
    x = model.inp(x)
    for block in model.blocks:
        x = functional_call(block, dict(block.named_parameters()), (x,))
    return end(model, x)


def other_parameters(model: Stack, x: Tensor) -> Tensor:
    x = model.inp(x)
    given = {name: param * 0.9 for name, param in parameters_of(model.blocks[0]).items()}
    x = functional_call(model.blocks[0], given, (x,))
    assert all(model.blocks[0].get_parameter(name) is not value for name, value in given.items())
    x = functional_call(model.blocks[1].up, {"weight": model.blocks[1].up.weight * 0.5}, (x,))
    return end(model, model.blocks[2](model.blocks[1](x)))


def generated_parameters(model: Stack, x: Tensor) -> Tensor:
    made = model.inp(x)[: WIDTH // 4].new_zeros(WIDTH, WIDTH) + model.inp(x).mean(0)
    return end(model, functional_call(model.blocks[0], {"up.weight": made + model.blocks[0].up.weight}, (x,)))


def per_sample_gradients(model: Stack, x: Tensor) -> Tensor:
    block = model.blocks[0]
    norms = vmap(grad(lambda params, row: functional_call(block, params, (row,)).square().sum()), in_dims=(None, 0))(
        parameters_of(block), model.inp(x)
    )
    return model.through(x).square().mean() + 0.01 * sum(n.square().sum() for n in norms.values())


def inner_step(model: Stack, x: Tensor) -> Tensor:
    block, x = model.blocks[0], model.inp(x)
    params = parameters_of(block)
    slopes = grad(lambda params: functional_call(block, params, (x,)).square().mean())(params)
    x = functional_call(block, {name: param - 0.1 * slopes[name] for name, param in params.items()}, (x,))
    return end(model, model.blocks[1](x))


def ensemble(model: Stack, x: Tensor) -> Tensor:
    each = [parameters_of(block) for block in model.blocks]
    stacked = {name: torch.stack([params[name] for params in each]) for name in each[0]}
    members = vmap(lambda params, x: functional_call(model.blocks[0], params, (x,)), in_dims=(0, None))
    return end(model, members(stacked, model.inp(x)).mean(0))


def gradient_of_an_input(model: Stack, x: Tensor) -> Tensor:
    slope = grad(lambda x: model.through(x).square().sum())(x)
    return model.through(x).square().mean() + slope.square().mean()


def gradient_without_graph(model: Stack, x: Tensor) -> Tensor:
    slope = grad(lambda x: model.through(x).square().sum())(x).detach()
    return model.through(x + 0.1 * slope).square().mean()


def each_row(model: Stack, x: Tensor) -> Tensor:
    return vmap(model.through)(x).square().mean()


def each_row_without_graph(model: Stack, x: Tensor) -> Tensor:
    with torch.no_grad():
        weights = vmap(model.through)(x)
    return (model.through(x) * weights).mean()


def jacobians(model: Stack, x: Tensor) -> Tensor:
    x = model.inp(x)
    x = model.blocks[1](x) @ jacrev(model.blocks[0])(x[0]) + x @ jacfwd(model.blocks[2])(x[0])
    return end(model, x @ hessian(lambda row: model.blocks[0](row).square().sum())(x[0]))


def products(model: Stack, x: Tensor) -> Tensor:
    y, forward = jvp(model.through, (x,), (torch.ones_like(x),))
    y, pull = vjp(model.through, x + forward.mean())
    return y.square().mean() + forward.square().mean() + pull(torch.ones_like(y))[0].square().mean()


def dual_numbers(model: Stack, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y, slope = forward_ad.unpack_dual(model.through(forward_ad.make_dual(x, torch.ones_like(x))))
    return y.square().mean() + slope.square().mean()


def under_a_checkpoint(model: Stack, x: Tensor) -> Tensor:
    x = model.inp(x)
    for block in model.blocks:
        call = partial(lambda block, x: functional_call(block, parameters_of(block), (x,)), block)
        x = checkpoint(call, x, use_reentrant=False)  # under which torch has no transforms
        add = partial(lambda block, x: x + vmap(grad(lambda row: block(row).sum()))(x), block)
        x = checkpoint(add, x, use_reentrant=True)
    return end(model, x)


def begins_late(model: Stack, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return each_row(model, x) if model.calls == STEPS else model.through(x).square().mean()


FORWARDS: tuple[Forward, ...] = (
    own_parameters,
    other_parameters,
    generated_parameters,
    per_sample_gradients,
    inner_step,
    ensemble,
    gradient_of_an_input,
    gradient_without_graph,
    each_row,
    each_row_without_graph,
    jacobians,
    products,
    dual_numbers,
    under_a_checkpoint,
    begins_late,
)


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def make(how: Forward, block: type[nn.Module] = Block) -> Stack:
    torch.manual_seed(0)
    return Stack(how, block)


def plain(model: Stack) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[float] = []
    for step in range(STEPS):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def engine_of(model: Stack, zero: dict[str, Any]) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage3_max_live_parameters": 0,
            "stage3_param_persistence_threshold": 0,
            **zero,
        },
        "gradient_clipping": 0.0,
    }
    engine = dsrun.initialize(model=model, config=settings)[0]
    if zero["stage"] == 3:
        store_of(engine).poison = True
    return engine


def _train(zero: dict[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, model in _models():
        engine = engine_of(model, zero)
        found[name] = []
        for step in range(STEPS):
            loss = engine(batch(step))
            engine.backward(loss)
            engine.step()
            found[name].append(float(loss.detach()))
    return found


def _models() -> list[tuple[str, Stack]]:
    models = [(how.__name__, make(how)) for how in FORWARDS]
    return [*models, ("inside a block", make(lambda model, x: model.through(x).square().mean(), Inside))]


@cache
def _expected() -> dict[str, list[float]]:
    return {name: plain(model) for name, model in _models()}


_ON_HOST = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
_WHOLE = pytest.mark.soak("stage 2 has whole parameters too")
_TWO_RANKS = pytest.mark.soak("one rank here, and two at stage 3 without it")


@pytest.mark.parametrize(
    ("zero", "ranks"),
    [
        pytest.param({"stage": 0}, 2, id="0", marks=_WHOLE),
        pytest.param({"stage": 2}, 1, id="2 alone"),
        pytest.param({"stage": 2}, 2, id="2", marks=_TWO_RANKS),
        pytest.param({"stage": 3}, 2, id="3"),
        pytest.param(_ON_HOST, 1, id="3 in host memory alone"),
        pytest.param(_ON_HOST, 2, id="3 in host memory", marks=_TWO_RANKS),
    ],
)
def test_a_forward_with_transforms_trains_as_in_plain_torch(zero: dict[str, Any], ranks: int) -> None:
    for found in run_ranks(ranks, _train, zero):
        assert found == _expected()


def test_a_model_called_inside_a_transform_of_the_scripts_gets_the_same_gradient() -> None:
    x = batch(0)
    expected = grad(lambda x: make(begins_late)(x))(x)
    for stage in (0, 3):
        model = make(begins_late)
        engine = engine_of(model, {"stage": stage})
        assert torch.equal(grad(lambda x, model=model: model(x))(x), expected)
        assert torch.equal(grad(lambda x, engine=engine: engine(x))(x), expected)


def memory_of_a_slot(model: Stack, x: Tensor) -> Tensor:
    block, x = model.blocks[0], model.inp(x)
    slopes = grad(lambda params: functional_call(block, params, (x,)).sum())(dict(block.named_parameters()))
    return end(model, x + slopes["up.bias"])


def test_memory_that_others_take_over_is_refused_where_a_transform_differentiates_by_it() -> None:
    assert plain(make(memory_of_a_slot))
    engine = engine_of(make(memory_of_a_slot), {"stage": 3})
    with pytest.raises(ModelError, match=r"`blocks\.0\.up\.weight` as named_parameters\(\) has it") as caught:
        engine(batch(0))
    assert "get_parameter" in (caught.value.hint or "")
