"""Kernels of scaled-dot-product attention: which can take a call, which is taken, and the bytes each holds.

For the runtime, which calls them, and for plans of it. Pure arithmetic: no torch, no device is asked.

Letters: B samples, H heads of queries, K heads of keys and values, L queries, S keys, D width of a head.

[Note: what kernels hold]
Fused kernels (flash, cudnn, efficient) never write the L x S matrix: for backward they keep queries, keys, values,
their output, and one fp32 number a query and head. Without a kernel (math), scaled copies of queries and keys, the
values and the matrix of probabilities are kept, in fp32 also for 16-bit inputs; with dropout the mask and the masked
matrix too. Inputs are taken to be [B, L, H, D] seen as [B, H, L, D], as models have them. Scratch memory of CPU
threads, at most a few MiB each, is not counted.
Sources: Dao, FlashAttention-2, 2023; torch's aten/src/ATen/native/transformers (attention.cpp, sdp_utils_cpp.h,
cuda/sdp_utils.cpp, cuda/attention_backward.cu). Figures of the CPU's kernels are held by tests to what torch allocates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

AttentionKernel = Literal["flash", "cudnn", "efficient", "math"]
Format = Literal["fp16", "bf16", "fp32", "fp64"]

KERNELS: Final[tuple[AttentionKernel, ...]] = ("flash", "cudnn", "efficient", "math")

_BYTES: Mapping[Format, int] = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
_STATISTIC = 4
_WIDEST_FLASH = 256
_WIDEST_CUDNN = 128
#: cuDNN from which on torch prefers it on Hopper and Blackwell (torch's check_prefer_cudnn_attention).
_FAST_CUDNN = 91500


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of attention.

    Attributes:
        batch: B.
        heads: H.
        kv_heads: K, a divisor of H.
        queries: L.
        keys: S.
        head_dim: D, of queries and keys.
        value_dim: width of a head of values; None if it is D.
        dtype: number format of queries, keys and values.
        device_type: `cpu`, `cuda` or another.
        capability: compute capability of the GPU, e.g. (9, 0).
        cudnn: its version as a number, e.g. 91500; None where not known.
        causal: a query sees the keys up to its own position.
        mask_dims: dimensions of a mask; 0 for none.
        mask_trains: the mask wants a gradient.
        dropout: share of probabilities that are dropped.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int | None = None
    dtype: Format
    device_type: str
    capability: tuple[int, int] = (8, 0)
    cudnn: int | None = None
    causal: bool = False
    mask_dims: int = 0
    mask_trains: bool = False
    dropout: float = 0.0

    @property
    def values_dim(self) -> int:
        """Width of a head of values, and of the output."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class KernelBytes:
    """Bytes of one call; see [Note: what kernels hold].

    Attributes:
        kept: bytes held between forward and backward, including queries, keys, values and output where the kernel keeps
            them.
        forward: peak bytes during forward, beyond queries, keys and values.
        backward: peak bytes during backward, beyond the kept bytes and the gradient of the output.
    """

    kept: int
    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What computes a call.

    Attributes:
        kernel: the one taken.
        reason: reason for the choice, worded as the end of a sentence about it.
        obstacles: the others that cannot take the call, and what is in their way.
    """

    kernel: AttentionKernel
    reason: str
    obstacles: Mapping[AttentionKernel, str]

    @property
    def able(self) -> list[AttentionKernel]:
        """All kernels that can take the call, the taken one first."""
        rest: list[AttentionKernel] = [name for name in KERNELS if name != self.kernel and name not in self.obstacles]
        return [self.kernel, *rest]


def choose_kernel(call: AttentionCall, *, allowed: Mapping[AttentionKernel, bool] | None = None) -> KernelChoice:
    """Chooses the kernel of a call: a fused one where there is one, for they hold no matrix; the fastest of those.

    Args:
        call: the call.
        allowed: answers of torch itself whether it allows each kernel, which overrule the rules here; None to use these
            rules alone.
    """
    obstacles: dict[AttentionKernel, str] = {}
    for kernel in KERNELS:
        known = _obstacle(kernel, call)
        verdict = None if allowed is None else allowed.get(kernel)
        if verdict is False:
            obstacles[kernel] = known or "torch refuses it for this call"
        elif verdict is None and known is not None:
            obstacles[kernel] = known
    order: list[AttentionKernel] = [kernel for kernel in _by_speed(call) if kernel not in obstacles]
    kernel = order[0]
    if kernel == "math":
        first = obstacles.get("efficient") if call.device_type == "cuda" else obstacles.get("flash")
        return KernelChoice(kernel, f"no fused kernel can: {first}", obstacles)
    left_out = "" if order[-1] != "math" else f"; math would hold the {call.queries:,} x {call.keys:,} matrix"
    reason = "fastest on this GPU" if kernel == "cudnn" and len(order) > 2 else "fused"
    return KernelChoice(kernel, reason + left_out, obstacles)


def _by_speed(call: AttentionCall) -> tuple[AttentionKernel, ...]:
    if call.capability[0] in (9, 10) and call.cudnn is not None and call.cudnn > _FAST_CUDNN:
        return ("cudnn", "flash", "efficient", "math")
    return KERNELS


def _obstacle(kernel: AttentionKernel, call: AttentionCall) -> str | None:
    """Returns what keeps a kernel from a call; None where it can take it."""
    if kernel == "math":
        return None
    if call.device_type not in ("cpu", "cuda"):
        return f"on {call.device_type} it is not known"
    if min(call.queries, call.keys) == 0:
        return "there are no queries or no keys"
    if call.device_type == "cpu":
        return _cpu_obstacle(call) if kernel == "flash" else "it needs CUDA"
    if kernel == "flash":
        return _flash_obstacle(call)
    return _cudnn_obstacle(call) if kernel == "cudnn" else _efficient_obstacle(call)


def _cpu_obstacle(call: AttentionCall) -> str | None:
    if call.dropout:
        return "dropout"
    if call.head_dim != call.values_dim:
        return "values are of another width than keys"
    if call.mask_trains:
        return "a mask that wants a gradient"
    return "a mask of neither two nor four dimensions" if call.mask_dims not in (0, 2, 4) else None


def _flash_obstacle(call: AttentionCall) -> str | None:
    if call.capability < (8, 0):
        return "a GPU older than Ampere"
    if _BYTES[call.dtype] != 2:
        return f"{call.dtype}"
    if call.mask_dims:
        return "a mask"
    if call.head_dim != call.values_dim:
        return "values are of another width than keys"
    if call.head_dim > _WIDEST_FLASH:
        return f"heads wider than {_WIDEST_FLASH}"
    return "causal with other numbers of queries and keys" if call.causal and call.queries != call.keys else None


def _cudnn_obstacle(call: AttentionCall) -> str | None:
    if call.capability < (8, 0):
        return "a GPU older than Ampere"
    if _BYTES[call.dtype] != 2:
        return f"{call.dtype}"
    if call.mask_trains:
        return "a mask that wants a gradient"
    if call.dropout * 16 != int(call.dropout * 16):
        return "dropout that is no multiple of 1/16"
    widest = max(call.head_dim, call.values_dim)
    if widest > _WIDEST_CUDNN:
        return f"heads wider than {_WIDEST_CUDNN}"
    return "a width of heads that is no multiple of 8" if call.head_dim % 8 or call.values_dim % 8 else None


def _efficient_obstacle(call: AttentionCall) -> str | None:
    if call.dtype == "fp64" or (call.dtype == "bf16" and call.capability < (8, 0)):
        return f"{call.dtype}" + ("" if call.dtype == "fp64" else " on a GPU older than Ampere")
    if call.heads != call.kv_heads:
        return "fewer heads of keys than of queries"
    step = 8 if _BYTES[call.dtype] == 2 else 4
    misfit = call.head_dim % step or call.values_dim % step
    return f"a width of heads that is no multiple of {step}" if misfit else None


def kernel_bytes(kernel: AttentionKernel, call: AttentionCall) -> KernelBytes:
    """Returns what a kernel holds in one call that trains; see [Note: what kernels hold]."""
    return _math_bytes(call) if kernel == "math" else _fused_bytes(kernel, call)


def _fused_bytes(kernel: AttentionKernel, call: AttentionCall) -> KernelBytes:
    size = _BYTES[call.dtype]
    on_cpu = call.device_type == "cpu"
    # On CUDA, flash gets heads of a multiple of 8, padded copies where they are not.
    step = 8 if kernel == "flash" and not on_cpu else 1
    width, value_width = _up(call.head_dim, step), _up(call.values_dim, step)
    q = call.batch * call.heads * call.queries * width * size
    k = call.batch * call.kv_heads * call.keys * width * size
    v = call.batch * call.kv_heads * call.keys * value_width * size
    out = call.batch * call.heads * call.queries * value_width * size
    rows = _up(call.queries, 32) if kernel == "efficient" else call.queries
    statistics = call.batch * call.heads * rows * (8 if on_cpu and call.dtype == "fp64" else _STATISTIC)
    backward = q + k + v
    if not on_cpu:
        # Gradients of queries are summed in fp32, beside a sum a row; those of shared keys and values are made a head
        # each. Of cudnn and efficient this is taken to be alike: their workspaces are not published.
        rows = _up(call.queries, 128)
        backward += call.batch * call.heads * rows * (_up(width, 32) + 1) * _STATISTIC
        if call.heads != call.kv_heads:
            backward += (k + v) // call.kv_heads * call.heads
    return KernelBytes(q + k + v + out + statistics, out + statistics, backward)


def _math_bytes(call: AttentionCall) -> KernelBytes:
    size = _BYTES[call.dtype]
    wide = max(size, 4)
    per_head = call.batch * call.heads
    q = per_head * call.queries * call.head_dim * wide
    k = per_head * call.keys * call.head_dim * wide
    v = per_head * call.keys * call.values_dim * wide
    out = per_head * call.queries * call.values_dim
    matrix = per_head * call.queries * call.keys
    kept = q + k + v + matrix * wide * (3 if call.dropout else 1)
    working = 2 * q + k  # scaled, and the queries once more in the order of a matrix product
    if size < wide:
        working += q + (k + v) // call.heads * call.kv_heads
    if call.heads != call.kv_heads:
        working += k + v
    elif call.dropout:
        working += k
    if call.causal:
        working += call.queries * call.keys * wide
    # Scores, probabilities, and a byte a score that says which are infinite; with dropout three matrices.
    plain = matrix * (2 * wide + 1) + per_head * call.queries
    dropped = matrix * 3 * wide + out * size + ((matrix + out) * size + out * (wide - size) if size < wide else 0)
    return KernelBytes(kept, working + (max(plain, dropped) if call.dropout else plain), v + 2 * matrix * wide)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
