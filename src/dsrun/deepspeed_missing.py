"""Names of DeepSpeed's package that are not here, each with what to use instead. Its engine: `deepspeed/missing.py`.

docs/reference/deepspeed-api.md is the list of what is here and what is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

#: Says whose errors these are.
_ABOUT = "deepspeed is dsrun here, see docs/reference/deepspeed-api.md"
#: Said of a name that only `deepspeed` of drop-in mode has, where a script looks for it in `dsrun`.
_FACE_ONLY = "it is there for scripts that import deepspeed: run the script with `dsrun --as-deepspeed`"
#: The package that drop-in mode puts on the path.
_FACE = Path(__file__).parent / "as_deepspeed" / "site" / "deepspeed"
#: Modules that DeepSpeed has at two paths: the one that `REASONS` names, and the other.
_ALSO: Mapping[str, str] = {
    "zero": "runtime.zero",
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "comm": "comm.comm",
    "pipe": "runtime.pipe",
}

#: Reason as it ends a sentence, and the names below `deepspeed` that it is given for. A module's is also that of all
#: below it; with `.*` the module is there, and the reason is for those of its names that are not.
REASONS: Mapping[str, str] = {
    # Inference and generation.
    "dsrun trains; it has no inference engine: `dsrun checkpoint export` writes weights for one": (
        "init_inference default_inference_config InferenceEngine DeepSpeedInferenceConfig inference "
        "model_implementations"
    ),
    "the model in training generates by itself: call engine.generate, or zero.unwrap_model_for_generation": (
        "DeepSpeedHybridEngine runtime.hybrid_engine runtime.hybrid_engine_graph runtime.rollout"
    ),
    # Models cut over ranks.
    "`tensor_parallel.autotp_size` in the config, or tp_model_init, has initialize cut a model's layers": (
        "module_inject.* replace_transformer_layer set_autotp_mode load_ds_config merge_tp_model_init_into_config "
        "record_tp_model_init_args runtime.tensor_parallel"
    ),
    "`tensor_parallel.tp_overlap_comm` has ranks that share a layer send while they compute": "runtime.domino",
    "`pipeline.schedule` has others; `zbv` too has a rank's two chunks in a V": (
        "DualPipeVEngine DualPipeVModule pipe.DualPipeVModule pipe.dualpipev"
    ),
    "engine.train_batch runs the schedule of `pipeline.schedule`, and sends between stages, by itself": (
        "pipe.p2p pipe.*"
    ),
    "there is no sequence parallelism: dsrun.long_sequence keeps small what grows with the sequence": (
        "sequence runtime.sequence_parallel.*"
    ),
    "a model's own experts are trained as they are; zero_optimization.leaf_module names their layers": "moe.*",
    "the sizes of axes stand in the config, and initialize makes their groups: ask the getters of utils.groups": (
        "utils.groups.* utils.bwc"
    ),
    # Weights and gradients in other forms.
    "dsrun trains weights as they are: compress the exported model by a library for that": "compression.*",
    "dsrun trains weights as they are; the section `fp8` has linear layers multiply in fp8": (
        "ops.fp_quantizer ops.quantizer runtime.weight_quantizer"
    ),
    "peft's adapters are trained as they are": "linear",
    "DeepSpeed 0.19.8 has no 1-bit optimizers either: take AdamW, or Lion; communication_data_type says how gradients "
    "travel": (
        "runtime.fp16.onebit runtime.config.ONEBIT_ADAM_OPTIMIZER runtime.config.ONEBIT_LAMB_OPTIMIZER "
        "runtime.config.ZERO_ONE_ADAM_OPTIMIZER runtime.compression"
    ),
    "engine.backward reduces gradients by itself; torch.distributed has collectives for all else": "runtime.comm",
    "gradients are dense: leave `sparse=True` out of torch.nn.Embedding": "runtime.sparse_tensor",
    # Kernels.
    "nothing is compiled; dsrun.ops has the optimizers": "ops.op_builder ops.__compatible_ops__ ops.* HAS_TRITON",
    "attention is the model's own, torch's scaled_dot_product_attention, or dsrun.long_sequence.attention": (
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig ops.transformer ops.DeepSpeedTransformerLayer "
        "ops.DeepSpeedTransformerConfig ops.sparse_attention ops.deepspeed4science"
    ),
    "torch.compile and engine.compile compile the model; DeepSpeed's passes over its graph are not here": (
        "compile ops.compile runtime.compiler"
    ),
    "dsrun.long_sequence.linear_cross_entropy is a loss without whole logits": "runtime.chunked_cross_entropy",
    # Offload, drives and files.
    "`dsrun nvme bench` measures drives; offload_optimizer.device and offload_param.device `nvme` use them": (
        "nvme ops.aio ops.gds runtime.swap_tensor"
    ),
    "offload_optimizer.device `cpu` keeps and steps optimizer states on the host; offload_optimizer.super_offload "
    "steps them during backward": (
        "runtime.superoffload runtime.zenflow ops.adam.ZenFlowCPUAdam ops.adam.ZenFlowSelectiveAdamW "
        "ops.adam.ZenFlowSelectiveAdamW_stage3 ops.adam.zenflow_cpu_adam ops.adam.zenflow_torch_adam"
    ),
    "dsrun page-locks host memory by itself (offload_optimizer.pin_memory); tensor.pin_memory() does it for others": (
        "ops.pin_memory utils.pin_memory utils.pin_memory_tracker"
    ),
    "engine.save_checkpoint writes beside training, by a writer of dsrun's own": (
        "io datastates runtime.model_checkpointing runtime.checkpoint_engine.*"
    ),
    "a checkpoint loads at any stage and on any number of ranks; `dsrun checkpoint import` reads DeepSpeed's": (
        "checkpoint.* runtime.state_dict_factory utils.zero_to_fp32.* utils.zero_to_torch.*"
    ),
    # Data and schedules.
    "samples, batches and tokens are not chosen by a schedule: choose them in the dataset or its sampler": (
        "runtime.data_pipeline ops.random_ltd"
    ),
    "initialize(training_data=...) and engine.deepspeed_io make loaders": "runtime.dataloader.*",
    "the optimizer type `Muon` finds the matrices by itself": (
        "set_optimizer_flags resolve_per_head_muon_after_sharding zero.muon"
    ),
    "a checkpoint loads at any number of ranks": "elasticity.*",
    # Measuring.
    "`dsrun plan --fit` prints the config that fits and is predicted to be the fastest": (
        "autotuning launcher.runner.run_autotuning"
    ),
    "the sections `tensorboard`, `csv_monitor`, `wandb` and `comet` have dsrun feed a tracker, and engine.monitor and "
    "engine.log take figures of a script": "monitor",
    "steps are recorded with their tokens and flops in records.jsonl": "profiling.*",
    "`dsrun show JOB --waits` says where ranks wait for each other": "utils.comms_logging",
    "timers are time.perf_counter after torch.cuda.synchronize(); records.jsonl has the seconds of steps": (
        "utils.config"
    ),
    "torch.cuda.memory_summary() and engine.memory_arenas() say what lies where": "utils.debug",
    # Starting ranks, and devices.
    "`dsrun -H HOSTFILE SCRIPT` starts ranks on hosts; its options stand in `dsrun run --help`": (
        "launcher.* env_report.*"
    ),
    "`dsrun run --bind` puts ranks on cores by itself": "utils.numa.* utils.get_numactl_cmd",
    "torch.accelerator and torch.cuda say what there is; get_accelerator() asks them for this rank": ("accelerator.*"),
    "dsrun computes on the GPU that a rank sees; `dsrun --no-gpu` hides all": "accelerator.set_accelerator",
    "torch.distributed carries what a script sends; init_distributed joins, and its dist_backend is nccl or gloo": (
        "comm.*"
    ),
    # ZeRO's inside.
    "a large Linear is a unit of its own, which zero.Init builds by slices": (
        "zero.TiledLinear zero.TiledLinearReturnBias zero.tiling zero.linear"
    ),
    "shards are cut over all ranks: use zero.Init": "zero.mics zero.MiCS_Init zero.mics_utils",
    "dsrun's ZeRO has other parts inside: zero.GatheredParameters, utils.safe_get_full_fp32_param and its like reach "
    "what is cut over ranks": (
        "zero.* utils.tensor_fragment.* utils.mixed_precision_linkage utils.get_full_hp_param utils.get_full_hp_grad "
        "utils.set_full_hp_param utils.set_full_hp_grad utils.get_hp_fragment_mapping utils.fragment_address "
        "utils.map_to_flat_opt_states utils.link_hp_params utils.lazy_init_hp_params_optimizer_state"
    ),
    "the engine does this inside: call forward, backward, step and what docs/reference/deepspeed-api.md lists": (
        "runtime.engine.* runtime.utils.* runtime.base_optimizer.* runtime.bf16_optimizer.* runtime.fp16.*"
    ),
    "dsrun.initialize takes any callable that makes an optimizer of parameters, or a scheduler of an optimizer": (
        "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable"
    ),
    "utils.z3_leaf_module says it of a module": "utils.z3_leaf_parameter utils.z3_leaf_module.*",
    "checkpointing.configure and the section `activation_checkpointing` say what becomes of activations": (
        "checkpointing.* runtime.activation_checkpointing.*"
    ),
    "checkpointing.get_cuda_rng_tracker() is the tracker, and its fork() has the usual name": (
        "checkpointing._CUDA_RNG_STATE_TRACKER checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME"
    ),
    # Configs.
    "DeepSpeedConfig(config) has a config's values, and `dsrun config show FILE` prints them": (
        "runtime.config.* runtime.config_utils runtime.precision_config.* runtime.constants.*"
    ),
    "the section `torch_autocast` switches it on": "runtime.torch_autocast",
    "data_types.keep_in_fp32_modules names what stays in fp32": "runtime.keep_in_fp32",
    "Python's garbage collector is the script's: `gc.disable()`, `gc.collect()`": "runtime.python_gc",
    "DeepSpeed 0.19.8 has dropped it too: leave it out": (
        "runtime.progressive_layer_drop runtime.eigenvalue runtime.quantize nebula"
    ),
    # Small things.
    "operator.attrgetter(path)(model) gets what a path names, and model.set_submodule(path, module) sets it": (
        "utils.recursive_getattr utils.recursive_setattr utils.module_utils"
    ),
    "torch.distributed has it": "utils.is_initialized utils.distributed",
    "transformers.StaticCache is a cache of one size": "utils.static_cache",
    "the standard module `logging` does the rest: the logger's name is `dsrun`": (
        "utils.logging.* utils.get_caller_func"
    ),
    "only DeepSpeed's own code calls it: leave the import out": (
        "compat git_version_info_installed git_version_info.* utils.torch utils.types utils.exceptions"
    ),
}

#: The same by name.
BY_NAME: Mapping[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}


def missing(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a module of the face does not have.

    Args:
        module: its full name, `dsrun`, `deepspeed`, or below one of them.
        name: name that the caller looked up in the module.
    """
    return AttributeError(f"module {module!r} has no attribute {name!r}{_explanation(f'{module}.{name}')}")


def missing_module(name: str) -> ModuleNotFoundError:
    """Returns the error for a module, or for a name that is imported from one, that `deepspeed` does not have.

    It does not carry the name: `from m import x` would take such an error for that of a submodule, and drop its text.

    Args:
        name: full name, below `deepspeed`.
    """
    return ModuleNotFoundError(f"{name} is not there{_explanation(name)}")


def _explanation(path: str) -> str:
    """Returns how an error's message ends: the reason, and where what there is stands; nothing if nothing is known."""
    package, _, below = path.partition(".")
    # A name is known by two paths: `zero` is `runtime.zero`, and the like.
    for short, long in _ALSO.items():
        if below == long or below.startswith(f"{long}."):
            below = short + below.removeprefix(long)
    if package != "deepspeed":
        reason = _FACE_ONLY if _is_in_face(below) else _reason(below, rest=False)
        return f": {reason}" if reason else ""
    return f": {_reason(below, rest=True) or 'dsrun has no such name'} ({_ABOUT})"


def _reason(below: str, *, rest: bool) -> str | None:
    """Returns the reason for the name, or for the module that it is in; None if there is none.

    Args:
        below: name below the package.
        rest: whether reasons for the rest of a module count (`.*`): the package is DeepSpeed's.
    """
    parts = below.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for key in (name, *([f"{name}.*"] if rest and length < len(parts) else [])):
            if key in BY_NAME:
                return BY_NAME[key]
    return None


def _is_in_face(below: str) -> bool:
    """Whether drop-in mode has the name: its module's file names it, or it is a module."""
    folder, _, name = _ALSO.get(below, below).replace(".", "/").rpartition("/")
    if (_FACE / folder / f"{name}.py").is_file() or (_FACE / folder / name / "__init__.py").is_file():
        return True
    module = next((file for file in (_FACE / folder / "__init__.py", _FACE / f"{folder}.py") if file.is_file()), None)
    return module is not None and re.search(rf'["\s]{re.escape(name)}"', module.read_text(encoding="utf-8")) is not None
