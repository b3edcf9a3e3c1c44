"""The contenders: each builds its part of the model and takes a step. Each imports what it needs when it is built."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .job import Job
from .model import bounds_of, layers_of, loss_of

LEARNING_RATE = 1e-4
CLIPPING = 1.0
Batch = list[tuple[Tensor, Tensor]]


class Trainer(Protocol):
    """What a contender offers."""

    def step(self, batch: Batch) -> float | None:
        """Trains on all micro batches and updates the weights; returns the mean loss, None where it is not known."""
        ...


def build(job: Job, rank: int) -> Trainer:
    """Returns a contender's rank."""
    match job.contender:
        case "plain":
            return _Plain(job)
        case "torch":
            return _Torch(job, rank)
        case "deepspeed":
            return _DeepSpeed(job)
        case "dsrun":
            return _Dsrun(job)
        case _:
            raise AssertionError(f"unknown contender {job.contender!r}")


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)


class _Plain:
    """One rank without a pipeline."""

    def __init__(self, job: Job) -> None:
        self._model = nn.Sequential(*layers_of(job))
        self._optimizer = _adamw(self._model)

    def step(self, batch: Batch) -> float:
        total = 0.0
        for inputs, labels in batch:
            loss = loss_of(self._model(inputs), labels) / len(batch)
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIPPING)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


class _Torch:
    """torch.distributed.pipelining on Gloo, the model cut by hand."""

    def __init__(self, job: Job, rank: int) -> None:
        import torch.distributed as dist
        from torch.distributed import pipelining

        dist.init_process_group("gloo")
        layers, bounds = layers_of(job), bounds_of(job)
        count = job.ranks * job.chunks
        # zbv goes down the ranks and comes up again; the others begin anew at the first rank.
        own = (rank, count - 1 - rank) if job.schedule == "zbv" else range(rank, count, job.ranks)
        stages: list[Any] = [
            pipelining.PipelineStage(
                nn.Sequential(*layers[bounds[chunk] : bounds[chunk + 1]]), chunk, count, torch.device("cpu")
            )
            for chunk in own
        ]
        self._is_first, self._is_last = 0 in own, count - 1 in own
        self._modules = nn.ModuleList(stage.submod for stage in stages)
        self._optimizer = _adamw(self._modules)
        if job.schedule == "1f1b":
            self._schedule: Any = pipelining.Schedule1F1B(stages[0], job.micros, loss_fn=loss_of)
        else:
            several: Any = {
                "interleaved": pipelining.ScheduleInterleaved1F1B,
                "zbv": pipelining.ScheduleZBVZeroBubble,
            }[job.schedule]
            self._schedule = several(stages, job.micros, loss_fn=loss_of)

    def step(self, batch: Batch) -> float | None:
        # It takes the whole batch, and cuts it into micro batches along the first dimension.
        inputs, labels = (torch.cat(parts) for parts in zip(*batch, strict=True))
        losses: list[Tensor] = []
        args = (inputs,) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*args, target=labels, losses=losses)
        else:
            self._schedule.step(*args)
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    def _clip(self) -> None:
        """Clips by the norm over all stages, which torch leaves to the script."""
        import torch.distributed as dist

        params = list(self._modules.parameters())
        squares = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None]).square()
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(params, CLIPPING, squares.sqrt())


class _DeepSpeed:
    """DeepSpeed's PipelineEngine on Gloo."""

    def __init__(self, job: Job) -> None:
        import deepspeed  # pyright: ignore[reportMissingImports]
        from deepspeed.pipe import PipelineModule  # pyright: ignore[reportMissingImports]

        deepspeed.init_distributed("gloo")
        # It cuts by class names or sizes; `uniform` cuts layers that sleep evenly, and blocks of one class as well.
        method = "uniform" if job.model == "sleep" else "type:Block"
        module: Any = PipelineModule(
            layers_of(job), num_stages=job.ranks, loss_fn=loss_of, partition_method=method, seed_layers=False
        )
        config = {
            "train_micro_batch_size_per_gpu": job.samples,
            "gradient_accumulation_steps": job.micros,
            "gradient_clipping": CLIPPING,
            "steps_per_print": 1_000_000,
        }
        self._engine: Any = deepspeed.initialize(
            model=module, config=config, optimizer=_adamw(module), dist_init_required=False
        )[0]

    def step(self, batch: Batch) -> float:
        return float(self._engine.train_batch(iter(batch)))


class _Dsrun:
    """dsrun, the model as a list of layers."""

    def __init__(self, job: Job) -> None:
        import dsrun
        from dsrun.pipe import PipelineModule

        config = {
            "train_micro_batch_size_per_gpu": job.samples,
            "gradient_accumulation_steps": job.micros,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
            "gradient_clipping": CLIPPING,
            "steps_per_print": 1_000_000,
            "pipeline": {"stages": job.ranks, "schedule": job.schedule, "virtual_stages": job.chunks},
        }
        module = PipelineModule(
            layers_of(job),
            num_stages=job.ranks,
            loss_fn=loss_of,
            partition_method=bounds_of(job),
            virtual_stages=job.chunks,
            placement="v" if job.schedule == "zbv" else "loop",
        )
        self._engine: Any = dsrun.initialize(model=module, config=config)[0]

    def step(self, batch: Batch) -> float:
        return float(self._engine.train_batch(iter(batch)))
