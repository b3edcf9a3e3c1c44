"""A small model in pipeline stages through whole engines, in threads: its data, its configs, and what it has computed.

What is to come of it stands in tests/runtime/engine/test_pipeline*.py.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsrun
from dsrun.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.pipeline.ranks import JobRank
from support.threaded_ranks import ranks_of_threads

CPU = torch.device("cpu")
WIDTH, VOCABULARY, LAYERS, MICROS, UPDATES = 32, 37, 8, 4, 3


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor, mask_T1: Tensor) -> Tensor:
        mixed = x_BTD.cumsum(1) / torch.arange(1, x_BTD.shape[1] + 1).view(-1, 1).to(x_BTD.dtype)
        return x_BTD + mask_T1 * self.down(self.drop(F.gelu(self.up(self.norm(mixed)))))


class Model(nn.Module):
    """Tokens in, logits out; `mask` is made of the tokens on every stage."""

    def __init__(self, *, tied: bool, dropout: float, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        mask_T1 = (tokens_BT != 0).to(self.norm.weight.dtype).unsqueeze(-1)
        x_BTD = self.embedding(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1]))
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_T1)
        return self.head(self.norm(x_BTD))


class TwoTied(Model):
    """Two weights that both ends use, which the first stage registers in another order than the last one."""

    def __init__(self) -> None:
        super().__init__(tied=True, dropout=0.0)
        self.mix = nn.Linear(WIDTH, 16, bias=False)
        self.mix.weight = self.positions.weight
        for name in ("positions", "head", "mix", "embedding"):
            self._modules[name] = self._modules.pop(name)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        mask_T1 = (tokens_BT != 0).to(self.norm.weight.dtype).unsqueeze(-1)
        x_BTD = self.embedding(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1]))
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_T1)
        y_BTD = self.norm(x_BTD)
        return self.head(y_BTD + self.mix(y_BTD) @ self.mix.weight)


def loss_fn(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def items(data_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro batches of one data rank; every one has another length, some another number of samples."""
    for number in itertools.count():
        generator = torch.Generator().manual_seed(1000 * data_rank + number)
        tokens = torch.randint(0, VOCABULARY, (2 - number % 3 % 2, 6 + number % 5), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


@dataclass
class Case:
    stages: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    data: int = 1
    zero: int = 0
    tied: bool = False
    dtype: str = "fp32"
    dropout: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)
    micros: int = MICROS
    plain: bool = False

    def __str__(self) -> str:
        name = "plain" if self.plain else f"{self.schedule}-{self.stages}x{self.virtual}"
        return f"{name}-data{self.data}-zero{self.zero}"

    @property
    def ranks(self) -> int:
        return self.stages * self.data

    def config(self) -> dict[str, Any]:
        pipeline = {"stages": self.stages, "schedule": self.schedule, "seed_layers": True}
        if self.virtual > 1:
            pipeline["virtual_stages"] = self.virtual
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.micros,
            "gradient_clipping": 0.2,
            "gradient_reduction": "update",
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
            "zero_optimization": {"stage": self.zero},
            **({} if self.plain else {"pipeline": pipeline}),
            "checkpoint": {"asynchronous": False},
            **({self.dtype: {"enabled": True}} if self.dtype != "fp32" else {}),
            **self.more,
        }


@dataclass
class Ended:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def run(
    case: Case,
    body: Callable[[Any, int], Any] | None = None,
    make: Callable[[], nn.Module] | None = None,
    *,
    of_rank: Callable[[int], nn.Module] | None = None,
    **words: Any,
) -> list[Any]:
    """Runs `body(engine, data rank)` on every rank of a case, and returns what it has returned.

    Args:
        case: the case.
        body: function that each rank runs; None: `train`.
        make: function that makes the model, which is copied for every rank; None: `Model`.
        of_rank: function that makes the model of a rank, in its place.
        words: further arguments of `dsrun.initialize`.
    """
    torch.manual_seed(7)
    if of_rank is not None:
        models = [of_rank(rank) for rank in range(case.ranks)]
    else:
        first = make() if make is not None else Model(tied=case.tied, dropout=case.dropout)
        models = [first, *(copy.deepcopy(first) for _ in range(1, case.ranks))]

    def rank(collectives: LoopbackCollectives) -> Any:
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=case.config(), **words)[0]
        try:
            return (body or train)(engine, collectives.rank % case.data)
        finally:
            engine.destroy()

    with ranks_of_threads(CPU) as threads:
        return LoopbackWorld(case.ranks).run(lambda collectives: threads(collectives, rank))


def weights_of(engine: Any) -> dict[str, Tensor]:
    with dsrun.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def train(engine: Any, data_rank: int, updates: int = UPDATES, first: int = 0) -> Ended:
    """Takes updates, from the number `first` of the data on."""
    losses: list[float] = []
    norms: list[float] = []
    batches = itertools.islice(items(data_rank), first * engine.gradient_accumulation_steps(), None)
    for _ in range(updates):
        losses.append(float(engine.train_batch(batches, loss_fn=loss_fn)))
        norms.append(engine.get_global_grad_norm())
    return Ended(losses, norms, weights_of(engine))


def assert_same(found: list[Ended], expected: Ended) -> None:
    weights: dict[str, Tensor] = {}
    for one in found:
        assert one.losses == expected.losses
        assert one.norms == expected.norms
        weights.update(one.weights)
    names = expected.weights.keys() | ({"head.weight"} & weights.keys())
    assert weights.keys() == names, "all ranks together have the whole model"
    for name, value in weights.items():
        whole = expected.weights.get(name, expected.weights["embedding.weight"])
        assert torch.equal(value, whole), name


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.embedding(tokens_BT)


class Layer(Block):
    def forward(self, x_BTD: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_BTD, torch.ones(()))


def logits(module: Tokens, x_BTD: Tensor) -> Tensor:
    return x_BTD @ module.embedding.weight.T


def layers_of(case: Case) -> Callable[[int], nn.Module]:
    """Returns what makes a rank's stage of a list of layers, whose first and last one have their weights in common."""

    def of_rank(rank: int) -> nn.Module:
        specs = [
            TiedLayerSpec("tokens", Tokens, tied_weight_attr=["embedding.weight"]),
            *(LayerSpec(Layer, 0.0) for _ in range(LAYERS)),
            nn.LayerNorm(WIDTH),
            TiedLayerSpec("tokens", Tokens, forward_fn=logits, tied_weight_attr=["embedding.weight"]),
        ]
        return PipelineModule(
            specs, num_stages=case.stages, loss_fn=loss_fn, job=JobRank(rank, case.ranks), virtual_stages=case.virtual
        )

    return of_rank
