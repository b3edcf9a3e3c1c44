"""Makes open-instruct's calls of GRPO in their order: a policy, a value model, a reference; saved and taken up again.

It is a script of this project that follows its sequence, not its code. Facts of each rank go to `OUT/facts-RANK.json`.
`--resume` starts from the checkpoint in OUT, through a universal one if `--universal` asks for that.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import trl_tiny
from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups, logger
from transformers import AutoModelForCausalLM, PreTrainedModel, get_scheduler
from transformers.integrations import HfDeepSpeedConfig

STEPS, MICRO = 4, 2


def configs(stage: int, *, universal: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts of the policy and of what only evaluates."""
    auto = ["sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"]
    auto += ["stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "reduce_bucket_size"]
    common = {"steps_per_print": 100, "bf16": {"enabled": True}, "prescale_gradients": False}
    common |= {"wall_clock_breakdown": False, "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 1}
    train = {
        **common,
        "zero_optimization": {
            "stage": stage,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none", "pin_memory": True},
            **dict.fromkeys(auto, "auto"),
            # What it takes by itself; it counts at stage 3 alone.
            "zero_hpz_partition_size": 8 if stage < 3 else 1,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
        },
        "gradient_clipping": 1.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        "sequence_parallel_size": 1,
        "checkpoint": {"load_universal": universal},
    }
    evaluate = {
        **common,
        "zero_optimization": {
            "stage": stage if stage == 3 else 0,
            "stage3_param_persistence_threshold": "auto",
            "offload_param": {"device": "none", "pin_memory": True},
        },
    }
    return train, evaluate


def read(path: str, config: dict[str, Any]) -> tuple[PreTrainedModel, object]:
    """A model, and what has to stay alive for transformers to have cut it as it was read."""
    kept = HfDeepSpeedConfig(config) if config["zero_optimization"]["stage"] == 3 else None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    model.config.use_cache = False
    return model, kept


def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    spared = [param for name, param in named if "norm.weight" in name]
    decayed = [param for name, param in named if "norm.weight" not in name]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]


def prepare(path: str, config: dict[str, Any]) -> tuple[DeepSpeedEngine, Any, object]:
    model, kept = read(path, config)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="eager",
        sequence_parallel_size=1,
        micro_batch_size=MICRO,
        seq_length_is_variable=True,
    )
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2, fused=False)
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=1, num_training_steps=STEPS * 2)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler, dist_init_required=False, mpu=mpu
    )
    return engine, scheduler, kept


def log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def save_model(engine: DeepSpeedEngine, folder: Path) -> None:
    """Gathers parameter by parameter, and writes on the first rank."""
    model = engine.module
    whole: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        cut = [p for p in [param] if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        with deepspeed.zero.GatheredParameters(cut, enabled=len(cut) > 0):
            here = param.data.cpu()
            if deepspeed.comm.get_rank() == 0:
                whole[name] = here
    if deepspeed.comm.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)


def update_reference(reference: DeepSpeedEngine, policy: DeepSpeedEngine, stage: int, alpha: float) -> None:
    for kept, param in zip(reference.parameters(), policy.parameters(), strict=True):
        if stage == 3:
            with deepspeed.zero.GatheredParameters([param, kept], modifier_rank=0):
                if deepspeed.comm.get_rank() == 0:
                    kept.data.mul_(1.0 - alpha).add_(param.data, alpha=alpha)
        else:
            kept.data.mul_(1.0 - alpha).add_(param.data, alpha=alpha)


def save_state(engine: DeepSpeedEngine, folder: Path, step: int) -> None:
    draws = {
        "torch_cpu_rng_state": torch.get_rng_state(),
        "numpy_rng_state": np.random.get_state(),
        "python_rng_state": random.getstate(),
    }
    state = {"training_step": step, "rng_states": draws, "rank": deepspeed.comm.get_rank()}
    kept = engine.mpu
    engine.mpu = None
    engine.save_checkpoint(str(folder), client_state=state)
    engine.mpu = kept
    if deepspeed.comm.get_rank() == 0:
        # As many as it keeps: one.
        found = [path for path in folder.iterdir() if path.name.removeprefix("global_step").isdigit()]
        for path in sorted(found, key=lambda path: int(path.name.removeprefix("global_step")))[:-1]:
            shutil.rmtree(path)


def make_universal(folder: Path) -> None:
    """What its launcher does before the ranks are there."""
    tag = (folder / "latest").read_text().strip()
    words = ["-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder / tag)]
    words += ["--output_folder", str(folder / f"ds_universal_{tag}"), "--inject_missing_state"]
    subprocess.run([sys.executable, *words], check=True)


def take_up(engine: DeepSpeedEngine, folder: Path) -> dict[str, Any]:
    kept, engine.mpu = engine.mpu, None
    path, states = engine.load_checkpoint(
        str(folder),
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
    )
    engine.mpu = kept
    assert path is not None, folder
    torch.set_rng_state(states["rng_states"]["torch_cpu_rng_state"])
    np.random.set_state(states["rng_states"]["numpy_rng_state"])
    random.setstate(states["rng_states"]["python_rng_state"])
    return states


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--universal", action="store_true")
    args = parser.parse_args()

    def load(self: object, path: str, map_location: object = None) -> object:
        logger.info(f"loading {path}")
        return torch.load(path, map_location=map_location, weights_only=False)

    torch_checkpoint_engine.TorchCheckpointEngine.load = load
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend="gloo", timeout=timedelta(minutes=2))
    deepspeed.init_distributed(timeout=timedelta(minutes=2))
    rank = deepspeed.comm.get_rank()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5 + rank)
    if args.universal:
        if rank == 0:
            make_universal(args.resume)
        torch.distributed.barrier()
    train, evaluate = configs(args.stage, universal=args.universal)
    policy, scheduler, kept = prepare(args.model, train)
    value, _, kept_too = prepare(args.model, train)
    first = 0
    if args.resume:
        first = take_up(policy, args.resume)["training_step"]
    reference, kept_last = read(args.model, evaluate)
    reference, *_ = deepspeed.initialize(model=reference, config=evaluate, mpu=None)
    reference.eval()
    policy.train()
    with torch.no_grad():  # as it warms up before the first weights are sent
        policy(input_ids=torch.tensor([[0]]))
    facts: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "mpu": policy.mpu, "draws": []}
    tokens = torch.tensor([trl_tiny.tokenizer()(text)["input_ids"] for text in _texts()])
    for step in range(first, STEPS):
        for part in range(2):
            at = ((step * 2 + part) * 2 + rank) * MICRO
            batch = tokens[at : at + MICRO]
            with torch.no_grad():
                old = log_probs(reference, batch)
            loss = -log_probs(policy, batch).mean() + 0.1 * (log_probs(policy, batch) - old).square().mean()
            is_boundary = part == 1
            policy.set_gradient_accumulation_boundary(is_boundary)
            policy.backward(loss)
            value.set_gradient_accumulation_boundary(is_boundary)
            value.backward(log_probs(value, batch).square().mean())
            if is_boundary:
                policy.step()
                value.step()
                facts["norms"].append(float(policy.get_global_grad_norm()))
            facts["losses"].append(loss.item())
        facts["rates"].append(scheduler.get_last_lr()[0])
        if step == 2:
            update_reference(reference, policy, args.stage, alpha=0.25)
        facts["draws"].append([float(torch.rand(1)), float(np.random.rand()), random.random()])
        if step == 1 and not args.resume:
            save_state(policy, args.out / "state", step + 1)
    save_model(policy, args.out / "model")
    facts["steps"] = [policy.global_steps, value.global_steps]
    facts["sequence"] = [groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()]
    try:
        UlyssesSPAttentionHF.register_with_transformers(policy.module, "sdpa", 2, MICRO)
    except Exception as error:
        facts["two ranks a sequence"] = str(error)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"facts-{rank}.json").write_text(json.dumps(facts))
    del kept, kept_too, kept_last


def _texts() -> list[str]:
    return [f"w{word} w{word + 1} w{word + 2} w{word + 5} w{word + 9}" for word in range(STEPS * 2 * 2 * MICRO)]


if __name__ == "__main__":
    main()
