"""Correctness on a GPU, run by the launcher: `dsrun -n 1 scripts/gpu/parity.py cuda`.

Losses of 10 steps of a small Llama are the same bits at every ZeRO stage, in fp32 and bf16, with accumulation and
clipping; equal to plain torch's within rounding; and go on bit for bit from a checkpoint of another stage. The host
waits for the device once a step. One JSON line on stdout; any difference ends it with exit code 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor

import dsrun
from gpu.models import TINY, Llama

_STEPS = 10
_ACCUMULATION = 2


def config(stage: int, *, bf16: bool, clipping: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": _ACCUMULATION,
        "gradient_clipping": clipping,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 0,
    }


def batches(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(TINY.vocabulary, (4, 33), generator=generator).to(device) for _ in range(_STEPS * _ACCUMULATION)
    ]


def fresh() -> Llama:
    torch.manual_seed(3)
    return Llama(TINY)


def train(engine: dsrun.Engine, data: list[Tensor]) -> list[float]:
    """Returns the loss of every micro step."""
    losses: list[Tensor] = []
    for tokens_BT in data:
        loss = engine(tokens_BT)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def waits_of_a_step(engine: dsrun.Engine, data: list[Tensor]) -> int:
    """Returns how often the host waited for the device in one whole step."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for tokens_BT in data[:_ACCUMULATION]:
                engine.backward(engine(tokens_BT))
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def plain_losses(data: list[Tensor], device: str) -> list[float]:
    model = fresh().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses: list[float] = []
    for index, tokens_BT in enumerate(data):
        loss = model(tokens_BT)
        (loss / _ACCUMULATION).backward()
        losses.append(float(loss))
        if index % _ACCUMULATION == _ACCUMULATION - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main() -> None:
    device = sys.argv[1]
    # Reductions of an embedding's gradient by atomic adds differ from run to run.
    torch.use_deterministic_algorithms(True)
    data = batches(device)
    result: dict[str, Any] = {"different": []}
    for bf16 in (False, True):
        for clipping in (0.0, 0.5):
            name = f"{'bf16' if bf16 else 'fp32'}, clipping {clipping}"
            first: list[float] = []
            for stage in (0, 1, 2, 3):
                engine, *_ = dsrun.initialize(model=fresh(), config=config(stage, bf16=bf16, clipping=clipping))
                losses = train(engine, data)
                first = first or losses
                if losses != first:
                    result["different"].append(f"{name}: stage {stage} from stage 0")
                if device == "cuda":
                    result.setdefault("host waits a step", {})[f"{name}, stage {stage}"] = waits_of_a_step(engine, data)
                engine.destroy()
            if not bf16 and not clipping:
                plain = plain_losses(data, device)
                result["largest difference from plain torch, fp32"] = max(
                    abs(a - b) for a, b in zip(first, plain, strict=True)
                )
    result["different"] += resumed_differently(data)
    print(json.dumps(result))
    if result["different"] or result["largest difference from plain torch, fp32"] > 1e-4:
        raise SystemExit(1)


def resumed_differently(data: list[Tensor]) -> list[str]:
    """Saves at stage 3 half-way and goes on at every stage; returns the stages that took other steps."""
    half = len(data) // 2
    different: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, *_ = dsrun.initialize(model=fresh(), config=config(3, bf16=True, clipping=0.5))
        train(engine, data[:half])
        engine.save_checkpoint(folder)
        expected = train(engine, data[half:])
        engine.destroy()
        for stage in (0, 1, 2, 3):
            engine, *_ = dsrun.initialize(model=fresh(), config=config(stage, bf16=True, clipping=0.5))
            engine.load_checkpoint(folder)
            if train(engine, data[half:]) != expected:
                different.append(f"stage {stage} resumed from a checkpoint of stage 3")
            engine.destroy()
    return different


if __name__ == "__main__":
    main()
