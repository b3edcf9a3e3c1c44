"""Names of DeepSpeed's package that are not here, each with what to use instead. Its engine: `deepspeed/missing.py`.

docs/reference/deepspeed-api.md is the list of what is here and what is not.
"""

from __future__ import annotations

from collections.abc import Mapping

_TRAINING_ONLY = "dsrun trains; it has no inference engine"

#: Qualified name below `dsrun`, and the reason as it ends a sentence.
PACKAGE: Mapping[str, str] = {
    "DeepSpeedConfig": "dsrun.config.load.load(source) reads and checks a config",
    "PipelineEngine": "there are no pipeline stages",
    "accelerator": "torch.accelerator and torch.cuda say what there is",
    "comm.log_summary": "every step is a line of records.jsonl in the job's folder",
    "init_inference": _TRAINING_ONLY,
    "moe": "a model's own experts are trained as they are; zero_optimization.leaf_module names their layers",
    "ops.op_builder": "nothing is compiled; dsrun.ops has the optimizers",
    "pipe": "there are no pipeline stages",
    "profiling": "steps are recorded with their tokens and flops in records.jsonl",
    "sequence": "there is no sequence parallelism",
    "tp_model_init": "there is no tensor parallelism",
    "utils.groups": "every rank is a data-parallel one; torch.distributed.group.WORLD has all",
    "utils.instrument_w_nvtx": "use torch.autograd.profiler.emit_nvtx",
    "utils.z3_leaf_parameter": "utils.z3_leaf_module says it of a module",
    "utils.zero_to_fp32": "engine.save_16bit_model writes whole weights; checkpoints are safetensors already",
    "zero.TiledLinear": "a large Linear is a unit of its own, which zero.Init builds by slices",
}


def missing(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a module of the face does not have.

    Args:
        module: its full name, `dsrun` or below.
        name: name that the caller looked up in the module.
    """
    reason = PACKAGE.get(f"{module}.{name}".removeprefix("dsrun."))
    return AttributeError(f"module {module!r} has no attribute {name!r}" + (f": {reason}" if reason else ""))
