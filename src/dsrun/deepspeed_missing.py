"""Names of DeepSpeed's package that are not here, each with what to use instead. Its engine: `deepspeed/missing.py`.

docs/reference/deepspeed-api.md is the list of what is here and what is not.
"""

from __future__ import annotations

from collections.abc import Mapping

_TRAINING_ONLY = "dsrun trains; it has no inference engine"
_NOT_COMPRESSED = "dsrun trains weights as they are"
_NO_SEQUENCE = "there is no sequence parallelism"
_NO_PIPELINE = "there are no pipeline stages"
_NOT_COMPILED = "nothing is compiled; dsrun.ops has the optimizers"
#: Says whose errors these are.
_ABOUT = "deepspeed is dsrun here, see docs/reference/deepspeed-api.md"
#: Modules that DeepSpeed has at two paths: the one that `PACKAGE` names, and the other.
_ALSO: Mapping[str, str] = {
    "zero": "runtime.zero",
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "comm": "comm.comm",
    "pipe": "runtime.pipe",
}

#: Qualified name below `dsrun`, and the reason as it ends a sentence.
PACKAGE: Mapping[str, str] = {
    "DeepSpeedConfig": "dsrun.config.load.load(source) reads and checks a config",
    "PipelineEngine": _NO_PIPELINE,
    "PipelineModule": _NO_PIPELINE,
    "accelerator": "torch.accelerator and torch.cuda say what there is",
    "autotuning": "`dsrun plan` finds what fits and is fast",
    "comm.log_summary": "every step is a line of records.jsonl in the job's folder",
    "compression": _NOT_COMPRESSED,
    "elasticity": "a checkpoint loads at any number of ranks",
    "inference": _TRAINING_ONLY,
    "init_inference": _TRAINING_ONLY,
    "linear": "peft's adapters are trained as they are",
    "module_inject": "there is no tensor parallelism, and no module is replaced",
    "monitor": "every step is a line of records.jsonl in the job's folder",
    "moe": "a model's own experts are trained as they are; zero_optimization.leaf_module names their layers",
    "ops.op_builder": _NOT_COMPILED,
    "ops.sparse_attention": "attention is the model's own",
    "ops.transformer": "attention is the model's own",
    "pipe": _NO_PIPELINE,
    "profiling": "steps are recorded with their tokens and flops in records.jsonl",
    "sequence": _NO_SEQUENCE,
    "tp_model_init": "there is no tensor parallelism",
    "utils.groups": "every rank is a data-parallel one; torch.distributed.group.WORLD has all",
    "utils.instrument_w_nvtx": "use torch.autograd.profiler.emit_nvtx",
    "utils.z3_leaf_parameter": "utils.z3_leaf_module says it of a module",
    "utils.zero_to_fp32": "engine.save_16bit_model writes whole weights; checkpoints are safetensors already",
    "zero.TiledLinear": "a large Linear is a unit of its own, which zero.Init builds by slices",
}

#: The same below modules that only `deepspeed` of drop-in mode has.
FACE: Mapping[str, str] = {
    "accelerator.set_accelerator": "dsrun computes on the GPU that a rank sees; `dsrun --no-gpu` hides all",
    "runtime.sequence_parallel": _NO_SEQUENCE,
}


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
    parts = below.split(".")
    reasons = ({**PACKAGE, **FACE}.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    reason = next((found for found in reasons if found is not None), None)
    if package != "deepspeed":
        return f": {reason}" if reason else ""
    return f": {reason or 'dsrun has no such name'} ({_ABOUT})"
