"""The contenders: each builds its part of the model and takes a step. Each imports what it needs when it is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .job import Job
from .model import llama_of

LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 0.01


class Trainer(Protocol):
    """What a contender offers."""

    def step(self, batch: Tensor) -> float:
        """Trains on a batch and updates the weights; returns the loss."""
        ...


def build(job: Job) -> Any:
    """Returns a contender's rank: a `Trainer`, or layers alone."""
    match job.contender:
        case "plain":
            return _Loop(_in_format(job))
        case "torch":
            return _Loop(_cut_by_torch(job))
        case "deepspeed":
            return _deepspeed(job)
        case "dsrun":
            return _Dsrun(job)
        case "linear":
            from .linears import joined_layers

            return joined_layers()
        case _:
            raise AssertionError(f"unknown contender {job.contender!r}")


class _Loop:
    """A training loop of plain torch; with bf16 as engines have it: fp32 masters, whose values the parameters get."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._params = list(model.parameters())
        is_bf16 = self._params[0].dtype == torch.bfloat16
        self._masters = [_local(param).float() for param in self._params] if is_bf16 else []
        self._optimizer = _adamw(self._masters or self._params)

    def step(self, batch: Tensor) -> float:
        loss = self._model(input_ids=batch, labels=batch).loss
        loss.backward()
        for param, master in self._mastered():
            assert param.grad is not None, "every parameter is used"
            master.grad = _local(param.grad).float()
        self._optimizer.step()
        for param, master in self._mastered():
            _local(param).copy_(master)
        for param in self._params:
            param.grad = None
        return float(loss.detach())

    def _mastered(self) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self._params, self._masters, strict=True) if self._masters else ()


def _in_format(job: Job) -> nn.Module:
    """Returns the whole model in the format of the job."""
    model: nn.Module = llama_of(job)
    return model.bfloat16() if job.bf16 else model


def _cut_by_torch(job: Job) -> nn.Module:
    """Cuts a model as transformers does when it loads one with `tp_plan="auto"`: DTensor, on Gloo."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (job.ranks,), mesh_dim_names=("tp",))
    model: Any = _in_format(job)
    return apply_tensor_parallelism(model, mesh, model.tp_plan)


def _deepspeed(job: Job) -> _Engine:
    """Hands a model to DeepSpeed's AutoTP on Gloo, which finds the layers that it cuts."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed("gloo")
    model = llama_of(job)
    config = {**_common(job), "tensor_parallel": {"autotp_size": job.ranks}}
    engine = deepspeed.initialize(
        model=model, config=config, optimizer=_adamw(model.parameters()), dist_init_required=False
    )[0]
    return _Engine(engine)


class _Engine:
    """An engine with DeepSpeed's calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self, batch: Tensor) -> float:
        loss = self._engine(input_ids=batch, labels=batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())


class _Dsrun(_Engine):
    """dsrun, which reads the model's own plan."""

    def __init__(self, job: Job) -> None:
        import dsrun

        section = {"autotp_size": job.ranks, **job.tensor_options}
        config = {
            **_common(job),
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": _WEIGHT_DECAY}},
            "tensor_parallel": section,
        }
        super().__init__(dsrun.initialize(model=llama_of(job), config=config)[0])

    def traffic(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns `calls` and `bytes` so far by collective, by axes; a rank alone on its axes sends nothing."""
        return {
            " x ".join(axes): {"calls": dict(view.traffic.calls), "bytes": dict(view.traffic.bytes)}
            for axes, view in self._engine._mesh.views.items()
            if view.size > 1
        }


def _common(job: Job) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": job.samples,
        "bf16": {"enabled": job.bf16},
        "gradient_clipping": 0.0,  # both engines clip if nothing is said
        "zero_optimization": {"stage": job.stage},
        "steps_per_print": 1_000_000,
    }


def _adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Returns torch's fused AdamW. It takes no list in which some are DTensors, so these get a group of their own."""
    groups: dict[bool, list[Tensor]] = {}
    for param in params:
        groups.setdefault(_is_cut(param), []).append(param)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()], lr=LEARNING_RATE, weight_decay=_WEIGHT_DECAY, fused=True
    )


def _is_cut(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _local(tensor: Tensor) -> Tensor:
    """Returns what this rank has of a tensor, in the tensor's own memory."""
    held: Any = tensor.detach()
    return held.to_local() if _is_cut(held) else held
