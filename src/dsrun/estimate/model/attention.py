"""Attention of one block of a planned run: the kernel that torch takes there, and what each kernel would hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsrun.choices.attention_kernels import (
    KERNELS,
    AttentionCall,
    AttentionKernel,
    KernelBytes,
    KernelChoice,
    choose_kernel,
    kernel_bytes,
)
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings

#: GPUs of the catalogue before Ampere, by the beginning of their names.
_OLDER: Mapping[str, tuple[int, int]] = {"V100": (7, 0), "T4": (7, 5)}
_AMPERE = (8, 0)


@dataclass(frozen=True, slots=True)
class AttentionEstimate:
    """Attention of one block, of one micro batch of one rank.

    Attributes:
        call: its shape.
        choice: the kernel, and what is in the way of the others.
        held: bytes of each kernel, of those that cannot take the call too.
        beyond_block: bytes that the chosen kernel keeps beyond queries, keys, values and output if it keeps a matrix,
            else 0; statistics of fused kernels and of norms are not counted.
    """

    call: AttentionCall
    choice: KernelChoice
    held: Mapping[AttentionKernel, KernelBytes]
    beyond_block: int


def attention_estimate(shape: Architecture, settings: RunSettings, machine: Machine) -> AttentionEstimate:
    """Returns what attention takes: causal, without a mask of its own and without dropout.

    Ranks that share a sequence have all of it for their share of the heads; those of a ring have their part of the
    queries for all heads.
    """
    ring = settings.axis_sizes.get("ring", 1)
    ranks = settings.tensor_parallel * settings.sequence_parallel // ring
    capability = _AMPERE
    if machine.gpu is not None:
        capability = next((of for name, of in _OLDER.items() if machine.gpu.name.startswith(name)), _AMPERE)
    half = "bf16" if machine.on_cpu or capability >= _AMPERE else "fp16"
    call = AttentionCall(
        batch=settings.micro_batch,
        heads=max(1, shape.heads // ranks),
        kv_heads=max(1, shape.kv_heads // ranks),
        queries=-(-settings.sequence // ring),
        keys=settings.sequence,
        head_dim=shape.head_dim,
        dtype=half if settings.compute_bytes == 2 else "fp32",
        device_type="cpu" if machine.on_cpu else "cuda",
        capability=capability,
        causal=True,
    )
    choice = choose_kernel(call)
    held: dict[AttentionKernel, KernelBytes] = {kernel: kernel_bytes(kernel, call) for kernel in KERNELS}
    return AttentionEstimate(call, choice, held, _beyond_block(call, choice, held) if choice.kernel == "math" else 0)


def _beyond_block(call: AttentionCall, choice: KernelChoice, held: Mapping[AttentionKernel, KernelBytes]) -> int:
    size = 4 if call.dtype == "fp32" else 2
    in_block = call.batch * call.queries * call.head_dim * (call.heads + 2 * call.kv_heads) * size
    return held[choice.kernel].kept - in_block
