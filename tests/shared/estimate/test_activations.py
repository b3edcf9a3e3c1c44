"""Activations by the layers of published models."""

from __future__ import annotations

from dataclasses import replace

from dsrun.estimate.activations import activation_bytes, block_bytes_per_token, logit_bytes_per_token
from dsrun.estimate.architecture import Architecture
from dsrun.estimate.settings import RunSettings

LLAMA_3_8B = Architecture(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
BF16 = RunSettings(compute_bytes=2, micro_batch=1, sequence=1024)


def test_a_block_of_llama_3_8b_keeps_164_kib_of_a_token() -> None:
    # 2h(6 + 2k + 4f) with k = 8/32 kv heads and f = 14336/4096: 2 x 4096 x 20.5.
    assert block_bytes_per_token(LLAMA_3_8B, BF16) == 164 * 1024


def test_an_mlp_without_a_gate_keeps_two_tensors() -> None:
    plain = replace(LLAMA_3_8B, gated=False, intermediate=4 * 4096, kv_heads=32)
    assert block_bytes_per_token(plain, BF16) == 2 * 4096 * (6 + 2 + 8)


def test_logits_of_a_token_are_16_bits_and_two_fp32_copies() -> None:
    assert logit_bytes_per_token(LLAMA_3_8B, BF16) == 10 * 128256


def test_without_recomputation_every_block_keeps_all() -> None:
    kept = activation_bytes(LLAMA_3_8B, BF16)
    assert kept.layers == 32 * 1024 * 164 * 1024
    assert kept.on_host == 0


def test_recomputed_blocks_keep_their_inputs_and_one_lives() -> None:
    kept = activation_bytes(LLAMA_3_8B, replace(BF16, recompute="blocks"))
    assert kept.layers == 1024 * (32 * 2 * 4096 + 164 * 1024)


def test_fewer_segments_keep_fewer_inputs_and_more_live_blocks() -> None:
    kept = activation_bytes(LLAMA_3_8B, replace(BF16, recompute="blocks", kept_segments=4))
    assert kept.layers == 1024 * (4 * 2 * 4096 + 8 * 164 * 1024)


def test_on_the_host_lie_all_block_inputs_and_on_the_gpu_three() -> None:
    kept = activation_bytes(LLAMA_3_8B, replace(BF16, recompute="blocks", activations_on_cpu=True))
    assert kept.on_host == 1024 * 32 * 2 * 4096
    assert kept.layers == 1024 * (3 * 2 * 4096 + 164 * 1024)


def test_tensor_parallel_ranks_share_all_but_the_norms() -> None:
    whole = 4 * 4096
    shared = (2 * 4096 + 2 * 1024 + 4 * 14336) // 2
    assert block_bytes_per_token(LLAMA_3_8B, replace(BF16, tensor_parallel=2)) == 2 * (whole + shared)


def test_ranks_that_share_a_sequence_share_its_tokens() -> None:
    assert replace(BF16, sequence_parallel=4).tokens_per_micro_step == 256
