"""Makes ms-swift's calls: its elastic batch, and the states that its trainers move to the CPU and back by hand.

The first is ms-swift's own function. The loops over `ds_tensor` and the optimizer's states are its trainers', which
leave alone what is on the CPU already; here they move all the same. Facts go to `OUT/facts-RANK.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import stand_ins
import torch
import trl_tiny

#: What ms-swift imports with its trainers and does not call here.
MISSING = [
    *("modelscope", "json_repair", "dacite", "PIL", "requests", "urllib3", "aiohttp", "fastapi", "openai", "uvicorn"),
    *("attrdict", "addict", "oss2", "einops", "scipy", "matplotlib", "sklearn", "torchvision"),
]


def elastic(world_size: int) -> dict[str, Any]:
    stand_ins.install(*MISSING)
    from swift.trainers.utils import prepare_deepspeed_elastic_config

    section = {
        "enabled": True,
        "max_train_batch_size": 64,
        "micro_batch_sizes": [2, 4],
        "min_gpus": 1,
        "max_gpus": 8,
        "version": 0.1,
    }
    args = SimpleNamespace(deepspeed={"zero_optimization": {"stage": 2}, "elasticity": section}, n_gpu=1)
    prepare_deepspeed_elastic_config(args)
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {"batch": micro * steps * world_size, "config": args.deepspeed["checkpoint"]}


def move_model(model: torch.nn.Module) -> int:
    moved = 0
    for param in model.parameters():
        tensor = param.ds_tensor if hasattr(param, "ds_tensor") else param
        tensor.data = tensor.data.to("cpu", non_blocking=True)
        moved += 1
    return moved


def move_optimizer(optimizer: Any) -> int:
    moved = 0
    for state in optimizer.state.values():
        for key, value in list(state.items()):
            if isinstance(value, torch.Tensor):
                state[f"{key}_offload_buffer"] = torch.empty_like(value, device="cpu")
                state[f"{key}_offload_buffer"].copy_(value, non_blocking=True)
                value.data = state[f"{key}_offload_buffer"]
                moved += 1
    return moved


def elsewhere(model: torch.nn.Module) -> str | None:
    """What a piece says that is given memory of another place, as the CPU's is beside a GPU."""
    cut = [param for param in model.parameters() if hasattr(param, "ds_tensor") and param.ds_tensor.numel() > 0]
    if not cut:
        return None
    param = cut[0]
    try:
        param.ds_tensor.data = param.ds_tensor.data.clone()
    except Exception as error:
        return str(error)
    return "taken"


def train(stage: int, out: Path, *, move: bool) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    model = trl_tiny.model()
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(3, 99, (4, 2, 8), generator=torch.Generator().manual_seed(deepspeed.comm.get_rank()))
    facts: dict[str, Any] = {"losses": []}
    for step, batch in enumerate(tokens):
        if move and step == 2:
            facts |= {"model": move_model(engine.module), "optimizer": move_optimizer(optimizer)}
            facts["elsewhere"] = elsewhere(engine.module)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        facts["losses"].append(loss.item())
    engine.save_checkpoint(str(out), tag=f"stage{stage}-{move}")
    engine.destroy()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    deepspeed.init_distributed()
    world_size, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
    facts: dict[str, Any] = {str(stage): train(stage, args.out, move=True) for stage in args.stages}
    facts["straight"] = train(args.stages[0], args.out, move=False)["losses"]
    facts["elastic"] = elastic(world_size)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"facts-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
