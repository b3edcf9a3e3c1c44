"""Attention of planned runs: the kernel by machine and format, its shape, and what a matrix adds to a block."""

from __future__ import annotations

from dataclasses import replace

from dsrun.estimate.model.activations import activation_bytes, block_bytes_per_token
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.attention import attention_estimate
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings

LLAMA = Architecture(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
BF16 = RunSettings(compute_bytes=2, micro_batch=2, sequence=1024)
CPU = Machine(label="cpu", ranks=2, ranks_per_host=2)


def with_gpu(name: str) -> Machine:
    gpu = find_gpu(name)
    return Machine(label=name, ranks=8, ranks_per_host=8, gpu=gpu, gpu_memory_bytes=gpu.memory_bytes)


def test_the_kernel_follows_machine_and_format() -> None:
    multi = replace(LLAMA, kv_heads=32)
    fp32 = replace(BF16, compute_bytes=4)
    assert attention_estimate(LLAMA, BF16, with_gpu("A100-80G")).choice.kernel == "flash"
    assert attention_estimate(multi, BF16, with_gpu("V100-32G")).choice.kernel == "efficient"
    assert attention_estimate(multi, fp32, with_gpu("A100-80G")).choice.kernel == "efficient"
    assert attention_estimate(LLAMA, fp32, CPU).choice.kernel == "flash"
    assert attention_estimate(LLAMA, fp32, CPU).beyond_block == 0


def test_ranks_that_share_layers_or_sequences_have_their_share_of_the_heads() -> None:
    call = attention_estimate(LLAMA, replace(BF16, axis_sizes={"tensor": 2, "ulysses": 2}), CPU).call
    assert (call.heads, call.kv_heads, call.queries, call.batch) == (8, 2, 1024, 2)


def test_what_every_kernel_holds_is_told_whichever_is_taken() -> None:
    estimate = attention_estimate(LLAMA, BF16, with_gpu("V100-32G"))
    assert estimate.choice.kernel == "math"
    assert estimate.held["math"].kept > 8 * estimate.held["flash"].kept


def test_a_matrix_is_counted_in_every_block_that_keeps_it() -> None:
    estimate = attention_estimate(LLAMA, BF16, with_gpu("V100-32G"))
    matrix, wide = 2 * 32 * 1024 * 1024 * 4, 2 * 1024 * 128 * 4
    assert estimate.beyond_block == matrix + wide * 96 - wide // 2 * 48
    plain = activation_bytes(LLAMA, BF16)
    counted = activation_bytes(LLAMA, BF16, attention=estimate.beyond_block)
    assert counted.layers - plain.layers == 32 * estimate.beyond_block
    recomputed = replace(BF16, recompute="blocks")
    once = activation_bytes(LLAMA, recomputed, attention=estimate.beyond_block)
    assert once.layers - activation_bytes(LLAMA, recomputed).layers == estimate.beyond_block, "one lives at a time"
    assert block_bytes_per_token(LLAMA, BF16) * 2048 > 0
