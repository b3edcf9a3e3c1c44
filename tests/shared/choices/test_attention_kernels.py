"""Which kernel takes a call of attention, and what it holds: values, without torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.choices.attention_kernels import (
    KERNELS,
    AttentionCall,
    AttentionKernel,
    KernelBytes,
    choose_kernel,
    kernel_bytes,
)

CUDA = AttentionCall(
    batch=1,
    heads=32,
    kv_heads=8,
    queries=4096,
    keys=4096,
    head_dim=128,
    dtype="bf16",
    device_type="cuda",
    capability=(8, 0),
    causal=True,
)
HOPPER = replace(CUDA, capability=(9, 0), cudnn=91600)
OLD = replace(CUDA, capability=(7, 0), dtype="fp16", kv_heads=32)
FP32 = replace(CUDA, dtype="fp32", kv_heads=32)
MASKED = replace(CUDA, mask_dims=4, causal=False)
CPU = replace(CUDA, device_type="cpu")


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (CUDA, "flash"),
        (HOPPER, "cudnn"),
        (replace(HOPPER, cudnn=91400), "flash"),
        (replace(HOPPER, cudnn=None), "flash"),
        (replace(HOPPER, head_dim=256), "flash"),
        (replace(CUDA, head_dim=264), "math"),
        (replace(CUDA, head_dim=264, kv_heads=32), "efficient"),
        (MASKED, "cudnn"),
        (replace(MASKED, mask_trains=True, kv_heads=32), "efficient"),
        (replace(MASKED, dropout=0.1, kv_heads=32), "efficient"),
        (OLD, "efficient"),
        (replace(OLD, dtype="bf16"), "math"),
        (FP32, "efficient"),
        (replace(FP32, head_dim=126), "math"),
        (replace(FP32, kv_heads=8), "math"),
        (replace(CUDA, dtype="fp64"), "math"),
        (replace(CUDA, queries=1), "cudnn"),
        (replace(CUDA, keys=0), "math"),
        (CPU, "flash"),
        (replace(CPU, dropout=0.1), "math"),
        (replace(CPU, value_dim=64), "math"),
        (replace(CPU, mask_dims=3), "math"),
        (replace(CPU, mask_dims=2, mask_trains=True), "math"),
        (replace(CUDA, device_type="mps"), "math"),
    ],
)
def test_the_choice_follows_device_format_and_shape(call: AttentionCall, kernel: AttentionKernel) -> None:
    choice = choose_kernel(call)
    assert choice.kernel == kernel
    assert choice.able[0] == kernel
    assert set(choice.able) | set(choice.obstacles) == set(KERNELS)
    assert not set(choice.able) & set(choice.obstacles)


def test_a_reason_names_what_was_in_the_way() -> None:
    assert choose_kernel(CUDA).reason == "fused; math would hold the 4,096 x 4,096 matrix"
    assert choose_kernel(HOPPER).reason == "fastest on this GPU; math would hold the 4,096 x 4,096 matrix"
    assert choose_kernel(replace(CPU, dropout=0.1)).reason == "no fused kernel can: dropout"
    assert choose_kernel(replace(FP32, head_dim=126)).reason == (
        "no fused kernel can: a width of heads that is no multiple of 4"
    )


def test_torchs_own_word_goes_before_ours() -> None:
    refused = choose_kernel(CUDA, allowed={"flash": False, "cudnn": False, "efficient": True})
    assert refused.kernel == "efficient", "newer ones take fewer heads of keys"
    assert refused.obstacles["flash"] == "torch refuses it for this call"
    assert choose_kernel(CUDA, allowed={"flash": False, "cudnn": False, "efficient": False}).kernel == "math"


def test_fused_kernels_grow_with_the_sequence_and_the_matrix_with_its_square() -> None:
    q, kv, rows = 32 * 4096 * 128 * 2, 8 * 4096 * 128 * 2, 32 * 4096 * 4
    flash = kernel_bytes("flash", CUDA)
    assert flash == KernelBytes(
        kept=2 * q + 2 * kv + rows, forward=q + rows, backward=q + 2 * kv + 32 * 4096 * (128 + 1) * 4 + 8 * kv
    )
    twice = replace(CUDA, queries=8192, keys=8192)
    assert kernel_bytes("flash", twice).kept == 2 * flash.kept
    matrix = 32 * 4096 * 4096 * 4
    assert kernel_bytes("math", CUDA).kept == matrix + 3 * 32 * 4096 * 128 * 4
    assert kernel_bytes("math", twice).kept > 3.8 * kernel_bytes("math", CUDA).kept
    assert kernel_bytes("math", replace(CUDA, dropout=0.1)).kept == 3 * matrix + 3 * 32 * 4096 * 128 * 4


def test_flash_on_cuda_pads_heads_to_a_multiple_of_eight() -> None:
    assert kernel_bytes("flash", replace(CUDA, head_dim=121)).kept == kernel_bytes("flash", CUDA).kept
    assert kernel_bytes("flash", replace(CPU, head_dim=121)).kept < kernel_bytes("flash", CPU).kept
