"""Which variables torch, and what it loads, read while they are imported and never again. Pure; imports no torch.

Ranks that are forked share one import of torch. A variable that is set after it has an effect if torch reads it where
it is used (`NCCL_*`, `TORCH_NCCL_*`, `CUDA_VISIBLE_DEVICES`), and none if torch has read it already. A test records
what an import reads, in Python and in C, and compares it with this table. What belongs to a family and is not known to
be read later counts as read at import: a rank with an interpreter of its own is never wrong, only slower to start.
"""

from __future__ import annotations

#: Read by `import torch.distributed`: torch's own, those of its profiler, and of OpenMP, MKL, oneDNN and OpenBLAS.
_FAMILIES = (
    *("TORCH_", "TORCHDYNAMO_", "TORCHEXPORT_", "PYTORCH_", "FX_", "COMPILE_STROBELIGHT_", "KINETO_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_", "DNNL_", "ONEDNN_", "OPENBLAS_"),
)
_NAMES = frozenset({"TORCHINDUCTOR_FORCE_DISABLE_CACHES"})
#: Read by `import torch._dynamo` as well, which has the configuration of the compiler.
_COMPILER_FAMILIES = ("TORCHINDUCTOR_", "AOTINDUCTOR_", "AOT_", "INDUCTOR_", "PARTITIONER_", "CUTLASS_", "PT2_")
_COMPILER_NAMES = frozenset(
    {
        *("CI", "CXX", "CUTEDSL_ENABLE_AUTOTUNING", "DUMP_AOTI_MINIFIER", "FAKE_ALLOW_META"),
        *("ENABLE_HOST_SIDE_TMA", "ENABLE_PERSISTENT_TMA_MATMUL", "ENABLE_TEMPLATE_AUTOWS"),
        *("ENABLE_TEMPLATE_TMA_STORE", "ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE"),
        *("LOG_AUTOTUNE_RESULTS", "LOG_TLPARSE", "UNSAFE_SKIP_FSDP_MODULE_GUARDS"),
        *("TRITON_BACKENDS_IN_TREE", "TRITON_DEBUG", "TRITON_ENABLE_PYTHON_STACKTRACE"),
        *("TRITON_INSTRUMENTATION_MODE", "TRITON_INTERPRET", "TRITON_PLUGIN_PATHS"),
    }
)
#: Of the families, but read when they are used.
_LATER_FAMILIES = ("TORCH_NCCL_", "TORCH_CUDNN_", "TORCH_FR_", "TORCH_GLOO_", "TORCH_FORCE_", "PYTORCH_TUNABLEOP_")
_LATER_NAMES = frozenset(
    {
        *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", "TORCH_DISABLE_ADDR2LINE"),
        *("PYTORCH_NVML_BASED_CUDA_CHECK", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_KERNEL_CACHE_PATH"),
        "TORCHINDUCTOR_CACHE_DIR",
    }
)
#: The allocator's settings are read with the first tensor of a GPU, but the choice of the allocator itself at import.
_ALLOCATOR = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})

#: torch has a public call that takes their new value: `honour` of `first_import` makes it.
HONOURED = frozenset({"OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"})


def is_read_at_import(name: str, *values: str | None, compiler: bool = True) -> bool:
    """Tells whether a variable that is set after the import of torch has no effect.

    Args:
        name: the variable.
        *values: values of the variable before and after it was set; None for no value, or one that is not known.
        compiler: whether the import is that of `torch._dynamo` too.
    """
    if name in HONOURED or name in _LATER_NAMES or name.startswith(_LATER_FAMILIES):
        return False
    if name in _ALLOCATOR:
        return any(value is not None and "backend" in value for value in values)
    if compiler and (name in _COMPILER_NAMES or name.startswith(_COMPILER_FAMILIES)):
        return True
    return name in _NAMES or name.startswith(_FAMILIES)
