"""What the measuring rank asks of a contender, and which module has it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from torch import Tensor, nn

from .job import Job

#: For all of them.
LEARNING_RATE = 1e-4
CLIPPING = 1.0


class Trainer(Protocol):
    """A model under training."""

    def forward_backward(self, batch: Tensor) -> float:
        """One micro step; returns the loss."""
        ...

    def update(self) -> None:
        """The optimizer's step, whatever it takes to have new parameters and no gradients."""
        ...

    def traffic(self) -> dict[str, dict[str, int]]:
        """Returns calls and bytes by collective so far; nothing where the contender does not count."""
        ...


class EngineTrainer:
    """A `Trainer` over an engine with DeepSpeed's calls.

    Args:
        engine: engine that returns the loss when it is called, and has `backward` and `step`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def forward_backward(self, batch: Tensor) -> float:
        """See `Trainer`."""
        loss = self._engine(batch)
        self._engine.backward(loss)
        return float(loss.detach())

    def update(self) -> None:
        """See `Trainer`."""
        self._engine.step()

    def traffic(self) -> dict[str, dict[str, int]]:
        """See `Trainer`: it does not count."""
        return {}


def prepare(job: Job) -> None:
    """Imports all that a contender needs (its `NEEDS`), so that imports are in no figure.

    And what torch imports with a process's first optimizer, which dsrun's spawner has imported before it forks.
    """
    for name in ("torch._dynamo", *_module(job).NEEDS):
        import_module(name)


def build(model: nn.Module, job: Job, *, rank: int) -> Trainer:
    """Hands the model over; this is what an initialisation takes."""
    return _module(job).build(model, job, rank)


def _module(job: Job) -> Any:
    return import_module(f"{__package__}.with_{job.contender}")
