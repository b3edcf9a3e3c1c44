"""Runs the fine-tuning kits, whose wheels are installed without what they require, and has their DeepSpeed configs.

scripts/environment puts the wheels into a folder of the environment that nothing but these jobs looks into. What the
kits import beside torch and Hugging Face's packages is stood in for, see tests/clients/stubs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import clients
from support.clients import ROOT, Job

#: A job of a kit has a deadline, see `clients.DEADLINE_S`; its tests wait for two of them.
DEADLINE_S = clients.DEADLINE_S * 2
LONE = Path(sys.prefix) / "lone-clients"
STUBS = ROOT / "tests" / "clients" / "stubs"


def need(package: str) -> None:
    """Skips the file's tests where this kit is missing, or what it needs of Hugging Face's.

    Args:
        package: name that the kit is imported by.
    """
    clients.need("transformers", "peft", "trl", "datasets")
    if (reason := why_none(package)) is not None:
        pytest.skip(reason, allow_module_level=True)


def why_none(package: str) -> str | None:
    """Says that a kit is missing, and how to get it, if it is."""
    if (LONE / package).is_dir():
        return None
    return (
        f"{package} is not in {LONE}; bash scripts/environment test-clients (tests/clients/lone.txt says where it runs)"
    )


def variables() -> dict[str, str]:
    """Variables of a job that finds the kits, and that spare its log bars of progress."""
    return {
        "PYTHONPATH": f"{LONE}:{STUBS}",
        "TQDM_DISABLE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory names other versions of Hugging Face's packages
    }


def run_on_dsrun(folder: Path, *runs: Sequence[str | Path], ranks: int = 2) -> Job:
    """Runs scripts that use a kit in ranks of `dsrun --as-deepspeed`; see `clients.run_on_dsrun`."""
    preload = (*clients.HUGGING_FACE, "peft", "trl")
    return clients.run_on_dsrun(folder, *runs, ranks=ranks, preload=preload, **variables())


def run_alone(folder: Path, *runs: Sequence[str | Path]) -> Job:
    """Runs scripts that use a kit in one process without a launcher."""
    return clients.run_words(folder, clients.several(*runs), **variables())


def facts(folder: Path) -> list[dict[str, Any]]:
    """What each rank has written of a run, in their order."""
    files = sorted(folder.glob("facts-*.json"))
    assert files, f"{folder} has no facts"
    return [json.loads(file.read_text()) for file in files]


# Their configs --------------------------------------------------------------------------------------------------------

_BATCH = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"], "auto")
_CPU = {"device": "cpu", "pin_memory": True}
_NONE = {"device": "none", "pin_memory": True}


@dataclass(frozen=True, slots=True)
class Kit:
    """How a kit writes DeepSpeed's configs.

    Attributes:
        always: keys of all its files.
        sections: `zero_optimization` of each file, by the file's name.
        more: further keys of single files.
    """

    always: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]]
    more: Mapping[str, Mapping[str, Any]]

    def configs(self) -> dict[str, dict[str, Any]]:
        """Its files by name, as a trainer reads them: with "auto" for what its own arguments say."""
        return {
            name: {**_BATCH, **self.always, "zero_optimization": dict(section), **self.more.get(name, {})}
            for name, section in self.sections.items()
        }


def _scaling(power: int, **more: Any) -> dict[str, Any]:
    scale = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    return {"enabled": "auto", "initial_scale_power": power, **scale, **more}


def _swift() -> Kit:
    buckets = {"allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 2e8}
    low = {**buckets, "overlap_comm": False, "reduce_bucket_size": 2e8, "contiguous_gradients": True}
    high = _stage_3_by_size(overlap_comm=False)
    return Kit(
        {
            "fp16": _scaling(16),
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "train_batch_size": "auto",
            "wall_clock_breakdown": False,
        },
        {
            "zero0": {"stage": 0, **low},
            "zero1": {"stage": 1, "offload_optimizer": _NONE, **low},
            "zero2": {"stage": 2, "offload_optimizer": _NONE, **low},
            "zero2_offload": {"stage": 2, "offload_optimizer": _CPU, **low},
            "zero3": {
                **high,
                "offload_optimizer": _NONE,
                "offload_param": _NONE,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
            },
            "zero3_offload": {**high, "offload_optimizer": _CPU, "offload_param": _CPU},
        },
        {},
    )


def _llama_factory() -> Kit:
    low = {
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    }
    high = _stage_3_by_size(overlap_comm=False)
    return Kit(
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": _scaling(16),
            "bf16": {"enabled": "auto"},
        },
        {
            "z0": {"stage": 0, **low},
            "z2": {"stage": 2, **low},
            "z2_offload": {"stage": 2, "offload_optimizer": _CPU, **low},
            "z2_autotp": {"stage": 2, **low},
            "z3": high,
            "z3_offload": {**high, "offload_optimizer": _CPU, "offload_param": _CPU},
            "z3_fp8": {
                **high,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "reduce_bucket_size": 12845056,
                "stage3_prefetch_bucket_size": 11560550,
                "stage3_param_persistence_threshold": 35840,
            },
        },
        {
            "z2_autotp": {"_comment": "models that can be cut", "tensor_parallel": {"autotp_size": 2}},
            "z3_fp8": {
                "train_batch_size": None,
                "zero_force_ds_cpu_optimizer": True,
                "fp16": {**_scaling(16), "enabled": False},
                "steps_per_print": 10_000_000,
                "comms_config": {"verbose": False},
                "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
            },
        },
    )


def _axolotl() -> Kit:
    by_hand = {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto"}
    sizes = dict.fromkeys(["stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"], "auto")
    old_sizes = dict.fromkeys(["prefetch_bucket_size", "param_persistence_threshold"], "auto")
    limits = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    old_limits = {"max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True}
    high = {"stage": 3, **by_hand, **sizes, **limits, "stage3_gather_16bit_weights_on_model_save": True}
    compiled = {"compile": {"disable": False, "backend": "inductor"}}
    in_bf16 = {"bf16": {"enabled": True}, "fp16": None}
    own_optimizer = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    adam = dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")
    low = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}
    return Kit(
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "wall_clock_breakdown": False,
            "bf16": {"enabled": "auto"},
            "fp16": _scaling(32, auto_cast=False),
        },
        {
            "zero1": {"stage": 1, "overlap_comm": True},
            "zero1_torch_compile": {"stage": 1, "overlap_comm": True},
            "zero2": low,
            "zero2_torch_compile": low,
            "zero3": high,
            "zero3_cpuoffload": {**high, "offload_optimizer": _CPU, "offload_param": _CPU},
            "zero3_bf16": {"stage": 3, **by_hand, **old_sizes, **old_limits},
            "zero3_bf16_cpuoffload_all": {
                "stage": 3,
                **by_hand,
                **sizes,
                **old_limits,
                "offload_optimizer": _CPU,
                "offload_param": _CPU,
            },
            "zero3_bf16_cpuoffload_params": {"stage": 3, **by_hand, **sizes, **old_limits, "offload_param": _CPU},
        },
        {
            "zero1": {"optimizer": {"type": "AdamW", "params": adam}},
            "zero1_torch_compile": compiled,
            "zero2_torch_compile": compiled,
            "zero3_bf16": in_bf16,
            "zero3_bf16_cpuoffload_all": {**in_bf16, **own_optimizer},
            "zero3_bf16_cpuoffload_params": {**in_bf16, **own_optimizer},
        },
    )


def _xtuner() -> Kit:
    high = {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True}
    return Kit(
        {
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "fp16": {"enabled": "auto", "initial_scale_power": 16},
            "bf16": {"enabled": "auto"},
        },
        {
            "zero1": {"stage": 1, "overlap_comm": True},
            "zero2": {"stage": 2, "overlap_comm": True},
            "zero2_offload": {"stage": 2, "overlap_comm": True, "offload_optimizer": _CPU},
            "zero3": high,
            "zero3_offload": {**high, "offload_optimizer": _CPU, "offload_param": _CPU},
        },
        {},
    )


def _stage_3_by_size(**more: Any) -> dict[str, Any]:
    """A section of stage 3 whose sizes a trainer derives from the model's."""
    derived = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]
    return {
        "stage": 3,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        **dict.fromkeys(derived, "auto"),
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        **more,
    }


def configs() -> dict[str, dict[str, Any]]:
    """The DeepSpeed configs that the kits come with, by kit and file.

    The values are those of ms-swift 4.6.0, LLaMA-Factory 0.9.5, xtuner 0.2.0 and axolotl of 2026.
    """
    made = {"ms-swift": _swift(), "LLaMA-Factory": _llama_factory(), "axolotl": _axolotl(), "xtuner": _xtuner()}
    return {f"{kit} {name}": config for kit, its in made.items() for name, config in its.configs().items()}
