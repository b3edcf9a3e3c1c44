"""Fine-tunes a tiny model by LLaMA-Factory's own workflow, once for each DeepSpeed config given.

What it imports and does not use here is stood in for. Facts of each rank go to `OUT/NAME/facts-RANK.json`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import stand_ins
import trl
import trl_tiny
from transformers import TrainerCallback, TrainerState


def arguments(args: argparse.Namespace, name: str, deepspeed: str | None) -> dict[str, object]:
    return {
        "model_name_or_path": args.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": args.finetuning,
        "dataset": "tiny",
        "dataset_dir": str(args.data),
        "template": "empty",
        "cutoff_len": 32,
        "output_dir": str(args.out / name / "output"),
        "deepspeed": deepspeed,
        "use_cpu": True,
        "flash_attn": "disabled",
        "per_device_train_batch_size": args.batch,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    }


def tools() -> dict[str, object]:
    """What its tools ask of DeepSpeed: the version, the flops of a model, and the experts that are gathered as one."""
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.profiling.flops_profiler import get_model_profile
    from deepspeed.utils import get_z3_leaf_modules
    from llamafactory.extras.misc import check_version
    from llamafactory.model.model_utils.moe import add_z3_leaf_module
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    check_version("deepspeed", mandatory=True)
    with get_accelerator().device(0):
        tokens = torch.ones((1, 16), dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
        flops, macs, params = get_model_profile(trl_tiny.model(), kwargs=inputs, print_profile=True, detailed=True)
    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_local_experts": 2, "max_position_embeddings": 64}
    model = MixtralForCausalLM(MixtralConfig(**shape, **sizes))
    add_z3_leaf_module(model)
    del kept
    leaves = [type(module).__name__ for module in get_z3_leaf_modules(model)]
    return {"flops": flops, "macs": macs, "params": params, "leaves": leaves}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--deepspeed", nargs="+", default=["none"])
    parser.add_argument("--finetuning", default="full")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tools", action="store_true")
    args = parser.parse_args()
    # Newer releases of TRL have its value head elsewhere; what is trained here has none.
    trl.AutoModelForCausalLMWithValueHead = object
    stand_ins.install("omegaconf", "torchaudio", "PIL", "av")
    from llamafactory.hparams import get_train_args
    from llamafactory.train.sft.workflow import run_sft

    class Report(TrainerCallback):
        """Writes what a training came to, for the workflow hands nothing back."""

        def __init__(self, out: Path) -> None:
            self.out = out

        def on_train_end(self, args: object, state: TrainerState, control: object, **more: object) -> None:
            self.out.mkdir(parents=True, exist_ok=True)
            rank = os.environ.get("RANK", "0")
            facts = {"log": state.log_history, "steps": state.global_step, "model": type(more["model"]).__name__}
            (self.out / f"facts-{rank}.json").write_text(json.dumps(facts))

    if args.tools:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"facts-{os.environ['RANK']}.json").write_text(json.dumps(tools()))
    for name, path in trl_tiny.configs(args.deepspeed):
        model, data, training, tuning, generating = get_train_args(arguments(args, name, path))
        run_sft(model, data, training, tuning, generating, [Report(args.out / name)])


if __name__ == "__main__":
    main()
