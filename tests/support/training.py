"""Bodies that test ranks run: train a small model and return what can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dsrun
from support.inside_engine import step_of
from support.models import CONTEXT, VOCAB, TinyGPT, loss_of


def config(
    stage: int, *, micro: int, accumulation: int = 1, bf16: bool = False, optimizer: str = "AdamW", **more: Any
) -> dict[str, Any]:
    """A config for the small model."""
    params: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if optimizer == "SGD":
        params["momentum"] = 0.9
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.7,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        # Most tests look at a checkpoint as soon as it is saved, often with another engine.
        "checkpoint": {"asynchronous": False},
        **more,
    }


def batches(step: int, *, samples: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, the same on every rank: (inputs, targets), each [samples, CONTEXT]."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (samples, CONTEXT + 1), generator=generator)
    tokens[:, 1::2] = tokens[:, ::2][:, : tokens[:, 1::2].shape[1]]  # something to learn
    return tokens[:, :-1], tokens[:, 1:]


def make_engine(settings: dict[str, Any], *, model: nn.Module | None = None, seed: int = 7, **more: Any) -> Any:
    """An engine over the small model, seeded."""
    torch.manual_seed(seed)
    return dsrun.initialize(model=model if model is not None else TinyGPT(), config=settings, **more)[0]


def train(engine: Any, steps: range, *, samples: int) -> list[float]:
    """Takes optimizer steps on this rank's share of each global batch; returns the global mean losses."""
    import torch.distributed as dist

    losses: list[float] = []
    rank, size = engine.global_rank, engine.world_size
    gas = engine.gradient_accumulation_steps()
    micro = engine.train_micro_batch_size_per_gpu()
    assert samples == micro * gas * size
    for step in steps:
        inputs, targets = batches(step, samples=samples)
        total = torch.zeros((), dtype=torch.float64)
        for micro_step in range(gas):
            first = (micro_step * size + rank) * micro
            loss = loss_of(engine(inputs[first : first + micro]), targets[first : first + micro])
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / gas / size)
    return losses


def train_and_weigh(
    settings: dict[str, Any], steps: int, samples: int, model_options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
    """Trains and returns (losses, full fp32 parameters, collective calls of the data axis)."""
    engine = make_engine(settings, model=_seeded(model_options))
    losses = train(engine, range(steps), samples=samples)
    return losses, full_parameters(engine), dict(engine.counters().collectives.calls)


def _seeded(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(7)
    return TinyGPT(**options)


def full_parameters(engine: Any) -> dict[str, Tensor]:
    """Gathers every master parameter whole."""
    return _gather(engine, lambda unit: unit.master)


def frozen_parameters(engine: Any) -> dict[str, Tensor]:
    """Gathers every frozen parameter whole, as forward reads it."""
    frozen = {name: param for name, param in engine.module.named_parameters() if not param.requires_grad}
    with dsrun.zero.GatheredParameters(frozen.values()):
        return {name: param.detach().clone() for name, param in frozen.items()}


def accumulated_gradients(engine: Any) -> dict[str, Tensor]:
    """Gathers the gradients accumulated since the last step whole."""
    return _gather(engine, lambda unit: unit.grad_sum)


def _gather(engine: Any, owned: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Makes tensors whole of the ranges that ranks own, by summing the pieces."""
    import torch.distributed as dist

    step = step_of(engine)
    if step.away is not None:
        step.away.settle()
    whole: dict[str, Tensor] = {}
    for unit in step.units:
        flat = torch.zeros(unit.layout.padded_numel)
        start, stop = unit.owned
        flat[start:stop] = owned(unit)
        if step.plan.shard_optimizer and dist.get_world_size() > 1:  # alone: on a GPU, NCCL takes none of the CPU's
            dist.all_reduce(flat)
        for extent in unit.layout.extents:
            whole[extent.name] = flat[extent.offset : extent.offset + extent.numel].view(extent.shape).clone()
    return whole
