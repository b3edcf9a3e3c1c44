"""Whole engines of a small Llama in any layout of pipe, data and tensor ranks, in threads: what each has computed.

Every layout trains on the same global batches: `MICROS` micro batches an update, dealt to data ranks in turn, so that
the first data ranks have the first micro batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import dsrun
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from support.llama import Layer, TinyLlama, tokens
from support.models import loss_of
from support.threaded_ranks import ranks_of_threads

MICROS, BLOCKS = 4, 4


@dataclass(frozen=True)
class Layout:
    """How ranks are divided, and what each of them holds.

    Attributes:
        data: ranks with samples of their own.
        tensor: ranks that share each layer.
        pipe: pipeline stages.
        virtual: chunks of a rank.
        schedule: order of the chunks' passes.
        stage: ZeRO stage.
        slices: whether blocks work on slices of the sequence.
        more: further keys of the config.
    """

    data: int = 1
    tensor: int = 1
    pipe: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    stage: int = 0
    slices: bool = False
    more: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def __str__(self) -> str:
        sizes = "".join(f"{name}{size}" for name, size in (("d", self.data), ("t", self.tensor), ("p", self.pipe)))
        chunks = f"-{self.schedule}-v{self.virtual}" if self.pipe > 1 else ""
        return f"{sizes}{chunks}-zero{self.stage}{'-slices' * self.slices}"

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.data * self.tensor * self.pipe

    def data_rank(self, rank: int) -> int:
        """Returns the place on the data axis of a rank."""
        return rank // self.tensor % self.data

    def config(self) -> dict[str, Any]:
        """Returns the config. Gradients are clipped, and units of any size gathered."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICROS // self.data,
            "gradient_clipping": 0.2,
            "gradient_reduction": "update",
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
            "pipeline": {"stages": self.pipe, "schedule": self.schedule, "virtual_stages": self.virtual},
            "tensor_parallel": {"autotp_size": self.tensor, "sequence_parallel": self.slices},
            "checkpoint": {"asynchronous": False},
        }
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        more = copy.deepcopy(self.more)
        zero |= more.pop("zero_optimization", {})
        return {**config, "zero_optimization": zero, **more}

    def having(self, **more: Any) -> Layout:
        """Returns the same with further keys of the config."""
        return replace(self, more={**self.more, **more})


#: Twelve of them, with each ZeRO stage, under which any is saved and any is loaded.
LAYOUTS = [
    Layout(),
    Layout(data=4, stage=1),
    Layout(tensor=4, stage=2),
    Layout(pipe=4),
    Layout(data=2, tensor=2, stage=3),
    Layout(data=2, pipe=2, stage=2),
    Layout(pipe=2, tensor=2, stage=1),
    Layout(data=2, pipe=2, virtual=2, schedule="breadth_first", stage=3),
    Layout(pipe=2, tensor=2, virtual=2, schedule="breadth_first", stage=3),
    Layout(pipe=2, virtual=2, schedule="zbv"),
    Layout(pipe=2, virtual=2, schedule="interleaved", stage=3),
    Layout(pipe=2, tensor=2, stage=2, slices=True),
]


class CountingLayer(Layer):
    """A block that counts its forwards in a buffer."""

    seen: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Counts, and runs the block."""
        if self.training:
            self.seen += 1
        return super().forward(x_BTD)


def counting_llama(*, tied: bool = False, layers: int = BLOCKS, dropout: float = 0.0) -> TinyLlama:
    """Returns a model whose blocks have norms, biases and a buffer; MLP and vocabulary divide by no number of ranks."""
    torch.manual_seed(11)
    model = TinyLlama(width=32, inner=51, layers=0, tied=tied)
    model.layers = nn.ModuleList(CountingLayer(32, 4, 2, 51, bias=True, dropout=dropout) for _ in range(layers))
    return model


def micro_batches(layout: Layout, data_rank: int, first_update: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields micro batches of one data rank, from the beginning of an update on."""
    each = MICROS // layout.data
    update = first_update
    while True:
        for micro in range(data_rank * each, (data_rank + 1) * each):
            samples = tokens(update, micro, 0)
            yield samples[:, :-1], samples[:, 1:]
        update += 1


@dataclass(slots=True)
class Trained:
    """What a rank has computed.

    Attributes:
        losses: mean loss of each update.
        norms: norm of each update.
    """

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])


def train(engine: Any, layout: Layout, updates: range) -> Trained:
    """Takes updates of these numbers, on the rank of an engine."""
    trained = Trained()
    batches = micro_batches(layout, layout.data_rank(engine.global_rank), updates.start)
    for _ in updates:
        trained.losses.append(float(engine.train_batch(batches, loss_fn=loss_of)))
        trained.norms.append(engine.get_global_grad_norm())
    return trained


def trained_with_seeds(model: nn.Module, layout: Layout) -> Trained:
    """Takes two updates of a rank that is a process, whose layers draw from seeds of their own in one stage too.

    Random numbers are a process's own. The generators stand as the caller has seeded them.
    """
    torch.set_num_threads(1)
    config = layout.config()
    config["pipeline"]["seed_layers"] = True
    engine: Any = dsrun.initialize(model=model, config=config)[0]
    try:
        return train(engine, layout, range(2))
    finally:
        engine.destroy()


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Returns the weights of the whole model, on every rank."""
    weights = engine.module_state_dict(all_ranks=True)
    assert weights is not None
    return weights


def on_layout(layout: Layout, body: Callable[[Any], Any], make: Callable[[], nn.Module] = counting_llama) -> list[Any]:
    """Runs `body` with the engine of each rank of a layout, and returns what each has returned.

    Args:
        layout: the layout.
        body: function of an engine.
        make: function that makes the model, the same on every rank.
    """
    models = [make() for _ in range(layout.ranks)]

    def rank(collectives: LoopbackCollectives) -> Any:
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=layout.config())[0]
        try:
            return body(engine)
        finally:
            engine.destroy()

    with ranks_of_threads(torch.device("cpu")) as run:
        return LoopbackWorld(layout.ranks).run(lambda collectives: run(collectives, rank))
