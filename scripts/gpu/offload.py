"""A step of one contender whose optimizer, or everything, lives outside the GPU.

    python -m gpu.offload CONTENDER DEVICE SIZE [--tokens 4096 16384 65536] [--layers N] [--folder DIR]

Contenders: `compute` (forward and backward in bf16, no optimizer: the part of the floor that nothing can hide);
`dsrun-gpu`, `dsrun-cpu` (optimizer in host memory), `dsrun-ram` (parameters too), `dsrun-disk` (optimizer on a drive,
parameters in host memory); `deepspeed-gpu`, `deepspeed-cpu`, `deepspeed-ram`, `deepspeed-disk` likewise; `fsdp2-ram`.
All train bf16 with fp32 masters and AdamW, clip at 1, and recompute every block. One JSON line on stdout. What the
figures are held against is in `offload_floor.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .llama import alone_under_torchrun, wait
from .models import Llama
from .shapes import OFFLOADED, LlamaShape

_TIME = 2048
#: Sequences of a micro batch at most: what does not fit one is accumulated.
_MICRO = 8
_WARM_UP, _STEPS = 2, 3
_LR = 1e-4
_CLIP = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender")
    parser.add_argument("device")
    parser.add_argument("size", choices=OFFLOADED)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384], help="of a step")
    parser.add_argument("--layers", type=int, help="another number of blocks")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="on the drive, for `disk`")
    args = parser.parse_args()
    device = torch.device(args.device)
    shape = OFFLOADED[args.size]
    if args.layers is not None:
        shape = shape.with_layers(args.layers)
    result: dict[str, Any] = {
        "contender": args.contender,
        "parameters": shape.numel(),
        "layers": shape.layers,
        "host_optimizer": _host_optimizer(args.contender),
        "rows": [],
    }
    for tokens in args.tokens:
        result["rows"].append(_row(args.contender, shape, device, tokens, args.folder))
        # What was measured stays if the next number of tokens does not go.
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _row(contender: str, shape: LlamaShape, device: torch.device, tokens: int, folder: Path) -> dict[str, Any]:
    """Builds the contender anew, for its number of micro batches is part of it, and times its steps."""
    time_ = min(_TIME, 4 * shape.width)
    sequences = max(1, tokens // time_)
    micro = min(_MICRO, sequences)
    torch.manual_seed(0)
    run = _make(contender, shape, device, accumulation=sequences // micro, folder=folder)
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(shape.vocabulary, (micro, time_ + 1), generator=generator).to(device)
        for _ in range(sequences // micro)
    ]
    seconds: list[float] = []
    losses: list[Tensor] = []
    phases: dict[str, float] = {}
    for index in range(_WARM_UP + _STEPS):
        if index == _WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait(device)
        started_s = time.perf_counter()
        for tokens_BT in batches:
            loss, took = run.step(tokens_BT)
            losses.append(loss)
            for name, took_s in took.items():
                phases[name] = min(took_s, phases.get(name, took_s))
        wait(device)
        if index >= _WARM_UP:
            seconds.append(time.perf_counter() - started_s)
    row: dict[str, Any] = {
        "seconds": seconds,
        "tokens": sequences * time_,
        "micro_batches": len(batches),
        "losses": [float(loss) for loss in losses],
        **phases,
    }
    if device.type == "cuda":
        row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    run.close()
    return row


class _Run:
    """A contender that has taken a model over."""

    def step(self, tokens_BT: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Takes one micro batch, and the optimizer's step behind the last one.

        Returns:
            the loss, and seconds of the phases that it knows of.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of memory and files."""


class _Compute(_Run):
    """Forward and backward, one after the other, and gradients dropped."""

    def __init__(self, model: Llama, device: torch.device) -> None:
        self._model, self._device = model.to(torch.bfloat16), device

    def step(self, tokens_BT: Tensor) -> tuple[Tensor, dict[str, float]]:
        started_s = time.perf_counter()
        loss = self._model(tokens_BT)
        wait(self._device)
        middle_s = time.perf_counter()
        loss.backward()
        wait(self._device)
        self._model.zero_grad()
        return loss.detach(), {"forward_s": middle_s - started_s, "backward_s": time.perf_counter() - middle_s}


class _Engine(_Run):
    """dsrun's engine, or DeepSpeed's: both have the same calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self, tokens_BT: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss = self._engine(tokens_BT)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach(), {}

    def close(self) -> None:
        self._engine.destroy()


class _Fsdp2(_Run):
    """FSDP2 with its whole state on the CPU; gradients are clipped as its users do."""

    def __init__(self, model: Llama, device: torch.device, *, accumulation: int) -> None:
        from torch._C._distributed_c10d import HashStore
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
        # Angles of positions stay in fp32, as nobody else rounds them.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False
        )
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
        self._model: nn.Module = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
        self._micro, self._accumulation = 0, accumulation

    def step(self, tokens_BT: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss = self._model(tokens_BT)
        (loss / self._accumulation).backward()
        self._micro += 1
        if self._micro % self._accumulation == 0:
            nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.detach(), {}


def _make(contender: str, shape: LlamaShape, device: torch.device, *, accumulation: int, folder: Path) -> _Run:
    name, _, tier = contender.partition("-")
    match name:
        case "compute":
            return _Compute(_built(shape, device), device)
        case "fsdp2":
            return _Fsdp2(_built(shape, torch.device("cpu")), device, accumulation=accumulation)
        case "dsrun":
            return _dsrun(shape, tier, device, accumulation=accumulation, folder=folder)
        case "deepspeed":
            return _deepspeed(shape, tier, device, accumulation=accumulation, folder=folder)
        case _:
            raise SystemExit(f"error: unknown contender {contender!r}")


def section_of(tier: str, folder: Path) -> dict[str, Any]:
    """Returns `zero_optimization` for a tier: gpu, cpu (optimizer away), ram (all away), disk (states on a drive)."""
    # Pages are locked by all: DeepSpeed's default was not to before 0.19.
    held: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    optimizer = held | {"device": "nvme", "nvme_path": str(folder)} if tier == "disk" else held
    match tier:
        case "gpu":
            return {"stage": 3}
        case "cpu":
            return {"stage": 2, "offload_optimizer": optimizer}
        case "ram" | "disk":
            return {"stage": 3, "offload_optimizer": optimizer, "offload_param": held}
        case _:
            raise SystemExit(f"error: unknown tier {tier!r}")


def _config(tier: str, *, accumulation: int, folder: Path) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": _CLIP,
        "bf16": {"enabled": True},
        "zero_optimization": section_of(tier, folder),
    }


def _dsrun(shape: LlamaShape, tier: str, device: torch.device, *, accumulation: int, folder: Path) -> _Run:
    import dsrun

    os.environ.setdefault("DSRUN_BACKEND", "nccl" if device.type == "cuda" else "gloo")
    config = _config(tier, accumulation=accumulation, folder=folder)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": _LR, "weight_decay": 0.01}}
    whole = tier in ("gpu", "cpu")
    around: AbstractContextManager[object] = nullcontext() if whole else dsrun.zero.Init(config_dict_or_path=config)
    with around:
        model = _built(shape, device if whole else torch.device("cpu"))
    engine, *_ = dsrun.initialize(model=model, config=config)
    return _Engine(engine)


def _deepspeed(shape: LlamaShape, tier: str, device: torch.device, *, accumulation: int, folder: Path) -> _Run:
    alone_under_torchrun()
    import deepspeed  # pyright: ignore[reportMissingImports]

    config = _config(tier, accumulation=accumulation, folder=folder)
    # torch's kernel, on the GPU and on the CPU: DeepSpeed's own would be compiled first.
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    whole = tier in ("gpu", "cpu")
    around: AbstractContextManager[object] = nullcontext() if whole else deepspeed.zero.Init(config_dict_or_path=config)
    with around:
        model = _built(shape, device if whole else torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return _Engine(engine)


def _host_optimizer(contender: str) -> str | None:
    """Returns what steps in host memory, as a reader of the table would not guess it."""
    name, _, tier = contender.partition("-")
    if name == "compute" or tier == "gpu":
        return None
    if name == "dsrun":
        return "dsrun's own"
    aside = ", not DeepSpeedCPUAdam, which is compiled first" if name == "deepspeed" else ""
    return f"torch's fused AdamW on the CPU{aside}"


def _built(shape: LlamaShape, device: torch.device) -> Llama:
    with device:
        return Llama(shape, recomputes=True)


if __name__ == "__main__":
    main()
