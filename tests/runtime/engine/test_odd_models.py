"""Odd but legal models train as in plain torch, at every stage and on two ranks: the same losses and weights.

Every stage has the bits of the others. Plain torch here adds up ranks' gradients itself, in the order in which two
ranks are added; what it then differs by is the rounding of a kernel's vector tails.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dsrun.errors import ModelError
from support.inside_engine import store_of
from support.ranks import run_ranks
from support.training import full_parameters, make_engine

WIDTH = 64  # a Linear of this width is a unit outside of blocks, too
STEPS = 4
STAGES = (0, 1, 2, 3)
Trained = tuple[list[float], dict[str, Tensor]]


class Mlp(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(self.norm(x)).tanh()


class ListsOfLists(nn.Module):
    """Stacks in stacks and in dicts, of which no container is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleList(Mlp() for _ in range(2)) for _ in range(2))
        self.by_name = nn.ModuleDict({"a": nn.ModuleList(Mlp() for _ in range(2)), "b": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for level in self.levels:
            for block in level:  # type: ignore[attr-defined]
                x = block(x)
        for block in self.by_name["a"]:  # type: ignore[attr-defined]
            x = block(x)
        return self.by_name["b"](x)


class SharedBlock(nn.Module):
    """One block stands twice in a stack, and in another module as well."""

    def __init__(self) -> None:
        super().__init__()
        first, second = Mlp(), Mlp()
        self.blocks = nn.ModuleList([first, second, first])
        self.again = nn.ModuleList([Mlp(), second])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.again):
            x = block(x)
        return x


class Output(OrderedDict[str, Any]):
    """A dict whose entries are attributes too, as transformers' outputs are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class DictsAndKeywords(nn.Module):
    """Everything goes by keyword, and dicts come back; None and numbers are among them."""

    class Block(Mlp):
        def forward(self, *, hidden: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
            hidden = super().forward(hidden) * scale
            return {"hidden": hidden if mask is None else hidden * mask, "mask": mask, "count": 3, "all": [hidden]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, inputs: Tensor) -> Output:
        out: dict[str, Any] = {"hidden": inputs, "mask": (inputs > -1).float()}
        for block in self.blocks:
            out = block(hidden=out["hidden"], mask=out["mask"], scale=0.9)
        return Output(loss=self.head(out["all"][0]).square().mean(), hidden=out["hidden"])


class InPlaceBetween(nn.Module):
    """Outputs of blocks are changed in place, also through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for index, block in enumerate(self.blocks):
            x = block(x)
            x += 0.1
            if index % 2:
                x[:, 0].mul_(0.5)
            else:
                x.view(-1)[:7].zero_()
        return x.clamp_(-3, 3)


class ByStep(nn.Module):
    """Other blocks run in other steps, in another order, on all ranks alike; the first step sees only two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        order = [(0, 1), (3, 2, 0), (1, 1, 3), (2,), (0, 1, 2, 3), (3, 0)][self.calls % 6]
        self.calls += 1
        for index in order:
            x = self.blocks[index](x)
        return x


class Parametrized(nn.Module):
    """Weights are made of other parameters: weight norm inside a block and outside, and an orthogonal one."""

    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.lin = parametrizations.weight_norm(self.lin)

    def __init__(self) -> None:
        super().__init__()
        self.inp = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.out = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley")

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Recurrent(nn.Module):
    """An LSTM keeps a list of its weights beside its parameters; one is a block, another stands alone."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.cell(x)[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lstm(x)[0]


class ListsOfParameters(nn.Module):
    """Parameters in lists and dicts, scalar, without elements, and one that is nowhere used."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.1, torch.randn(WIDTH)])
            self.named = nn.ParameterDict(
                {"gain": nn.Parameter(torch.tensor(1.5)), "none": nn.Parameter(torch.zeros(0))}
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + (x @ self.weights[0] + self.weights[1]).tanh() * self.named["gain"] + self.named["none"].sum()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.mine = nn.ParameterList([torch.ones(WIDTH)])
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.mine[0]


class Statistics(nn.Module):
    """BatchNorm counts and averages in its buffers; another buffer is no part of a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.register_buffer("offset", torch.full((WIDTH,), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        for block in self.blocks:
            x = x + block(x) + self.offset
        return x


class SparseEmbedding(nn.Module):
    """An embedding with sparse gradients, with a row that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(70, WIDTH, padding_idx=3, sparse=True)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x[..., 0] * 100).long().abs() % 70)
        for block in self.blocks:
            x = block(x)
        return x


class WideMemoryFormat(nn.Module):
    """Weights that are transposed or channels-last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(WIDTH, 32).t())

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(x.shape[0], 4, 8, -1)
        return F.linear(self.conv(images).reshape(x.shape[0], -1, WIDTH), self.turned)


class SideLoss(nn.Module):
    """Blocks leave a loss of their own in an attribute, made last of all, with a weight that nothing else uses.

    Args:
        first_step: from which on the loss counts it.
    """

    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 4)
            self.side = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.side = self.gate(out).logsumexp(-1).square().mean()
            return out

    def __init__(self, first_step: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.first_step, self.calls = first_step, 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        if self.calls >= self.first_step:
            for block in self.blocks:
                loss = loss + block.side  # type: ignore[operator]
        self.calls += 1
        return loss


class RouterLoss(nn.Module):
    """Blocks leave a loss in an attribute that a gate gives, whose choice their output depends on."""

    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2)
            self.side = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            shares = self.gate(x).softmax(-1)
            out = super().forward(x) * shares[..., :1]
            self.side = shares.square().mean()
            return out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + 0.1 * self.blocks[0].side + 0.1 * self.blocks[2].side  # type: ignore[operator]


class Hooked(nn.Module):
    """Tensor hooks on parameters, and a forward hook that replaces an output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.blocks[1].lin.weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[union-attr]
        self.blocks[0].register_forward_hook(lambda module, args, out: out * 1.1)
        self.blocks[2].register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.9,))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class GivesBlocksAway(nn.Module):
    """Blocks are run by a function, through `forward` itself, and by a list that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.plain = [self.blocks[2], self.blocks[3]]

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0].forward(x)
        x = nn.Sequential(self.blocks[1])(x)
        for block in self.plain:
            x = (lambda b, y: b(y))(block, x)
        return x


Loss = Callable[[Any, Tensor], Tensor]


def _mean_square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _keywords(model: Any, x: Tensor) -> Tensor:
    return model(inputs=x).loss


def _scalar(model: Any, x: Tensor) -> Tensor:
    return model(x)


def _autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def _looks_between(model: Any, x: Tensor) -> Tensor:
    """Evaluates before and after the forward that counts, in inference mode and in eval mode."""
    with torch.inference_mode():
        model(x)
    loss = _mean_square(model, x)
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            x = model(x)
    model.train()
    return loss + x.mean()


def _generates(model: Any, x: Tensor) -> Tensor:
    """A forward on what the model itself said."""
    with torch.no_grad():
        for _ in range(3):
            x = torch.cat([x, model(x)[:, -1:]], dim=1)
    return _mean_square(model, x)


@dataclass(frozen=True)
class Case:
    """A model, and how its loss is made."""

    build: Callable[[], nn.Module]
    loss: Loss = _mean_square


def _stack() -> nn.Module:
    return nn.Sequential(OrderedDict(inp=nn.Linear(WIDTH, WIDTH), blocks=nn.Sequential(*(Mlp() for _ in range(4)))))


CASES: dict[str, Case] = {
    "lists of lists": Case(ListsOfLists),
    "a block that stands twice": Case(SharedBlock),
    "dicts and keywords": Case(DictsAndKeywords, _keywords),
    "changes in place between blocks": Case(InPlaceBetween),
    "other blocks in other steps": Case(ByStep),
    "parametrizations": Case(Parametrized),
    "recurrent": Case(Recurrent),
    "lists of parameters": Case(ListsOfParameters),
    "statistics": Case(Statistics),
    "sparse gradients": Case(SparseEmbedding),
    "other memory formats": Case(WideMemoryFormat),
    "hooks of the model's own": Case(Hooked),
    "blocks called in other ways": Case(GivesBlocksAway),
    "autocast": Case(_stack, _autocast),
    "evaluation in between": Case(_stack, _looks_between),
    "generation in between": Case(_stack, _generates),
    "a gate's loss in an attribute": Case(RouterLoss, _scalar),
    "a side loss made last": Case(SideLoss, _scalar),
    "a side loss from the second step on": Case(lambda: SideLoss(1), _scalar),
}


#: What a block says beside its output: made after it, with weights of its own.
SIDE_LOSSES = ("a side loss made last", "a side loss from the second step on")


def _build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return CASES[name].build()


def _sample(step: int, rank: int) -> Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
    }


def _train(stage: int, name: str) -> Trained | str:
    case = CASES[name]
    try:
        engine = make_engine(_settings(stage), model=_build(name))
        if stage == 3:
            store_of(engine).poison = True
        losses: list[float] = []
        for step in range(STEPS):
            loss = case.loss(engine, _sample(step, engine.global_rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    except ModelError as error:
        return str(error)
    return losses, full_parameters(engine)


def _stages(name: str, ranks: int) -> tuple[int, ...]:
    """Stages of a case by default: stage 3, of several ranks each of the others in turn, and all for side losses."""
    if name in SIDE_LOSSES:
        return STAGES
    return (3,) if ranks == 1 else (list(CASES).index(name) % 3, 3)


def _train_all(every_stage: bool) -> dict[str, dict[int, Trained | str]]:
    ranks = int(os.environ["WORLD_SIZE"])
    return {
        name: {stage: _train(stage, name) for stage in (STAGES if every_stage else _stages(name, ranks))}
        for name in CASES
    }


def _plain(name: str, ranks: int) -> list[Trained]:
    """What each of `ranks` replicas sees whose gradients are averaged: buffers are a replica's own."""
    case = CASES[name]
    replicas = [_build(name) for _ in range(ranks)]
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.05, momentum=0.9) for r in replicas]
    losses: list[list[float]] = [[] for _ in replicas]
    for step in range(STEPS):
        for rank, replica in enumerate(replicas):
            loss = case.loss(replica, _sample(step, rank))
            loss.backward()
            losses[rank].append(loss.item())
        for params in zip(*(replica.parameters() for replica in replicas), strict=True):
            if all(param.grad is None for param in params):
                continue  # nobody has used it
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
            for param in params:
                param.grad = sum(grads[1:], start=grads[0]) / ranks
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [(seen, {n: p.detach() for n, p in r.named_parameters()}) for seen, r in zip(losses, replicas, strict=True)]


_AT_ALL = pytest.mark.soak("each model at stage 3, and on two ranks at one of the others")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, False), id="1 rank"),
        pytest.param((2, False), id="2 ranks"),
        pytest.param((1, True), id="1 rank, every stage", marks=_AT_ALL),
        pytest.param((2, True), id="2 ranks, every stage", marks=_AT_ALL),
    ],
)
def trained(request: pytest.FixtureRequest) -> list[dict[str, dict[int, Trained | str]]]:
    """For each rank, what every case gave at its stages: numbers, or the text of an error."""
    ranks, every_stage = request.param
    return run_ranks(ranks, _train_all, every_stage, timeout_s=180.0)


def _check(trained: list[dict[str, dict[int, Trained | str]]], name: str, stages: tuple[int, ...] = STAGES) -> None:
    stages = tuple(stage for stage in stages if stage in trained[0][name])
    for rank, (losses, weights) in enumerate(_plain(name, len(trained))):
        first: Any = trained[0][name][stages[0]]
        for stage in stages:
            found = trained[rank][name][stage]
            assert not isinstance(found, str), f"stage {stage}: {found}"
            assert found[0] == pytest.approx(losses, rel=1e-6, abs=1e-7), f"stage {stage}"
            assert found[1].keys() == weights.keys()
            for key, value in weights.items():
                torch.testing.assert_close(found[1][key], value, rtol=1e-5, atol=1e-6, msg=f"stage {stage}: {key}")
                assert torch.equal(found[1][key], first[1][key]), f"stages {stages[0]} and {stage} differ in {key}"


@pytest.mark.parametrize("name", [name for name in CASES if name not in SIDE_LOSSES])
def test_an_odd_model_trains_as_in_plain_torch_at_every_stage(
    trained: list[dict[str, dict[int, Trained | str]]], name: str
) -> None:
    _check(trained, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (SIDE_LOSSES[0], "`blocks.2.gate.bias` is used outside of the forward of `blocks.2`"),
        (SIDE_LOSSES[1], "`blocks.2.gate.weight` of `blocks.2` gets a gradient outside of the backward of its forward"),
    ],
)
def test_a_side_loss_made_after_a_blocks_output_counts_below_stage_3_and_is_refused_there(
    trained: list[dict[str, dict[int, Trained | str]]], name: str, message: str
) -> None:
    _check(trained, name, STAGES[:3])
    for rank in trained:
        assert message in str(rank[name][3])
