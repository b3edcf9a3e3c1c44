"""Pipeline stages through whole engines, in threads: the same bits as one stage, under every schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsrun
from dsrun.errors import ConfigError, ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
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
            "pipeline": pipeline,
            **({self.dtype: {"enabled": True}} if self.dtype != "fp32" else {}),
            **self.more,
        }


@dataclass
class Ended:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def run(case: Case, body: Callable[[Any, int], Any] | None = None) -> list[Any]:
    torch.manual_seed(7)
    models = [Model(tied=case.tied, dropout=case.dropout) for _ in range(case.ranks)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())

    def rank(collectives: LoopbackCollectives) -> Any:
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=case.config())[0]
        try:
            return (body or train)(engine, collectives.rank % case.data)
        finally:
            engine.destroy()

    with ranks_of_threads(CPU) as threads:
        return LoopbackWorld(case.ranks).run(lambda collectives: threads(collectives, rank))


def weights_of(engine: Any) -> dict[str, Tensor]:
    with dsrun.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def train(engine: Any, data_rank: int, updates: int = UPDATES) -> Ended:
    batches, losses, norms = items(data_rank), [], []
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


PIPELINES = [
    Case(2, "gpipe"),
    Case(2, "1f1b"),
    Case(4, "1f1b"),
    Case(2, "interleaved", 2),
    Case(4, "interleaved", 2),
    Case(2, "breadth_first", 2),
    Case(4, "zero_bubble"),
    Case(2, "zbv", 2),
]


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: f"{case.schedule}-{case.stages}x{case.virtual}")
def test_stages_have_the_bits_of_one_stage(case: Case, dtype: str, tied: bool) -> None:
    one = run(Case(tied=tied, dtype=dtype))[0]
    found = run(Case(case.stages, case.schedule, case.virtual, tied=tied, dtype=dtype))
    assert_same(found, one)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stages_and_data_ranks_have_the_bits_of_data_ranks_alone(zero: int) -> None:
    expected = run(Case(data=2, zero=zero))
    found = run(Case(2, data=2, zero=zero))
    assert expected[0].losses == expected[1].losses
    assert_same(found, expected[0])


def test_one_stage_by_train_batch_has_the_bits_of_the_loop() -> None:
    def loop(engine: Any, data_rank: int) -> Ended:
        batches, losses, norms = items(data_rank), [], []
        for _ in range(UPDATES):
            total = 0.0
            for _ in range(MICROS):
                inputs, targets = next(batches)
                loss = loss_fn(engine(inputs), targets)
                engine.backward(loss)
                engine.step()
                total += float(loss.detach())
            losses.append(total / MICROS)
            norms.append(engine.get_global_grad_norm())
        return Ended(losses, norms, weights_of(engine))

    by_hand, whole = run(Case(), loop)[0], run(Case())[0]
    assert whole.norms == by_hand.norms
    assert whole.losses == pytest.approx(by_hand.losses, rel=1e-7)
    for name, value in whole.weights.items():
        assert torch.equal(value, by_hand.weights[name]), name
