"""Tokens a second and peak memory of one contender on a Llama shape in bf16: `python -m gpu.llama dsrun-3 cuda 1.3B`.

All contenders train the same: bf16 parameters with fp32 masters, AdamW's fused kernel, no clipping, no activation
checkpointing, and batches from one seed. After each sequence length the JSON line of all so far is on stdout. What is
compared with what is decided in `parts.py`, whether their losses agree in `losses.py`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .models import Llama
from .shapes import LLAMA_1B3, TINY

_WARM_UP, _STEPS = 3, 8
#: Tokens of a step: 16,384, in sequences of both lengths.
_SEQUENCES = {"1.3B": ((2048, 8), (512, 32)), "tiny": ((64, 2), (16, 8))}
_LR = 1e-4
#: Takes one step on tokens [B, T + 1] and returns the loss.
Step = Callable[[Tensor], Tensor]


def main() -> None:
    contender, kind, size = sys.argv[1:]
    device = torch.device(kind)
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(LLAMA_1B3 if size == "1.3B" else TINY)
    parameters = sum(p.numel() for p in model.parameters())
    step = make_step(contender, model, device)
    rows: list[dict[str, Any]] = []
    for time_, batch in _SEQUENCES[size]:
        generator = torch.Generator().manual_seed(1)
        vocabulary = model.head.out_features
        data = [torch.randint(vocabulary, (batch, time_ + 1), generator=generator).to(device) for _ in range(4)]
        rows.append({"sequence": time_, "batch": batch, **measure(step, data, device)})
        # What was measured stays if the next length does not go.
        print(json.dumps({"contender": contender, "parameters": parameters, "rows": rows}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(step: Step, data: list[Tensor], device: torch.device) -> dict[str, Any]:
    """Times steps one by one, each to its end on the device.

    Args:
        step: one training step.
        data: batches of tokens, [B, T + 1] each, taken in turn.
        device: device on which the steps run.

    Returns:
        seconds of every step after the warm-up, tokens of a step, losses of all steps, and bytes at the peak on CUDA.
    """
    seconds: list[float] = []
    losses: list[Tensor] = []
    for index in range(_WARM_UP + _STEPS):
        if index == _WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait(device)
        started = time.perf_counter()
        losses.append(step(data[index % len(data)]))
        wait(device)
        if index >= _WARM_UP:
            seconds.append(time.perf_counter() - started)
    tokens = data[0].shape[0] * (data[0].shape[1] - 1)
    row: dict[str, Any] = {"seconds": seconds, "tokens": tokens, "losses": [float(loss) for loss in losses]}
    if device.type == "cuda":
        row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return row


def make_step(contender: str, model: Llama, device: torch.device) -> Step:
    """Returns the contender's training step over `model`, which it takes over."""
    name, _, stage = contender.partition("-")
    match name:
        case "plain":
            return _plain(model)
        case "dsrun":
            return _dsrun(model, int(stage), device)
        case "fsdp2":
            return _fsdp2(model, device)
        case "deepspeed":
            return _deepspeed(model, int(stage), device)
        case _:
            raise SystemExit(f"error: unknown contender {contender!r}")


@dataclass(frozen=True, slots=True)
class _Masters:
    """bf16 parameters of a model, and the fp32 copies that an optimizer updates."""

    params: list[nn.Parameter]
    masters: list[nn.Parameter]

    @classmethod
    def of(cls, model: nn.Module) -> _Masters:
        masters = [nn.Parameter(p.detach().clone().float()) for p in model.parameters()]
        model.to(torch.bfloat16)
        return cls(list(model.parameters()), masters)


def _plain(model: Llama) -> Step:
    both = _Masters.of(model)
    optimizer = torch.optim.AdamW(both.masters, lr=_LR, fused=True)

    def step(tokens_BT: Tensor) -> Tensor:
        loss = model(tokens_BT)
        loss.backward()
        for master, param in zip(both.masters, both.params, strict=True):
            assert param.grad is not None, "every parameter is used"
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(both.params, both.masters, strict=True):
                param.copy_(master)
        return loss.detach()

    return step


def _dsrun(model: Llama, stage: int, device: torch.device) -> Step:
    import dsrun

    os.environ.setdefault("DSRUN_BACKEND", "nccl" if device.type == "cuda" else "gloo")
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": _LR, "weight_decay": 0.01}},
    }
    engine, *_ = dsrun.initialize(model=model, config=config)

    def step(tokens_BT: Tensor) -> Tensor:
        loss = engine(tokens_BT)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _fsdp2(model: Llama, device: torch.device) -> Step:
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    # Angles of positions stay in fp32, as nobody else rounds them.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)

    def step(tokens_BT: Tensor) -> Tensor:
        loss = model(tokens_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _deepspeed(model: Llama, stage: int, device: torch.device) -> Step:
    alone_under_torchrun()
    import deepspeed  # pyright: ignore[reportMissingImports]

    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    # torch's fused kernel, as all others have: DeepSpeed's own would be compiled first.
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens_BT: Tensor) -> Tensor:
        loss = engine(tokens_BT)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def alone_under_torchrun() -> None:
    """Sets the environment of a world of one process, for who reads nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def wait(device: torch.device) -> None:
    """Returns when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
