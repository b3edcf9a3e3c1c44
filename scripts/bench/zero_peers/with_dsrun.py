"""dsrun as a contender: its engine, by its public names."""

from __future__ import annotations

from typing import Any

from torch import nn

from .contender import CLIPPING, LEARNING_RATE, EngineTrainer
from .job import Job

#: See `contender.prepare`.
NEEDS: tuple[str, ...] = ("dsrun.runtime.engine.initialize",)


def config_of(job: Job) -> dict[str, Any]:
    """Returns the config of an engine; `dsrun plan` takes the same."""
    return {
        "train_micro_batch_size_per_gpu": job.shape.micro,
        "bf16": {"enabled": job.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": job.stage},
        "steps_per_print": 1_000_000,
    }


class Engine(EngineTrainer):
    """dsrun counts what its collectives move."""

    def traffic(self) -> dict[str, dict[str, int]]:
        """See `Trainer`: the axis' own counters, and the elements of all units, which theory needs."""
        counted = self._engine.counters().collectives
        numel = {"all": sum(unit.layout.padded_numel for unit in self._engine._sharded.units)}
        return {"calls": dict(counted.calls), "bytes": dict(counted.bytes), "padded_numel": numel}


def build(model: nn.Module, job: Job, rank: int) -> Engine:
    """See `contender.build`."""
    import dsrun

    engine, *_ = dsrun.initialize(model=model, config=config_of(job))
    return Engine(engine)
