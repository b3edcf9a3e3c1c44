"""Activations by the layers of published models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsrun.estimate.model.activations import (
    activation_bytes,
    block_bytes_per_token,
    forwards_again,
    kept_result_bytes_per_token,
    logit_bytes_per_token,
    product_bytes_per_token,
    working_bytes_per_token,
)
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.run.settings import RunSettings

LLAMA_3_8B = Architecture(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
BF16 = RunSettings(compute_bytes=2, micro_batch=1, sequence=1024)

GPT = Architecture(layers=12, hidden=256, intermediate=1024, heads=8, kv_heads=8, head_dim=32, vocab=100, gated=False)
FP32 = RunSettings(compute_bytes=4, micro_batch=2, sequence=64)
#: Letters of docs/guides/activations.md: a block's input, all that it saves, results of its products, backward's work.
I = 2 * 64 * 256 * 4  # noqa: E741
S, K, W = 16 * I, 10 * I, 4 * I
#: A packed input: a byte an element and four for 128.
P = I // 4 + I // 128

#: Settings beside the guide's formula and its forwards. 12 blocks are 4 segments of 3.
FORMULAS: list[tuple[dict[str, Any], int, float]] = [
    ({"recompute": "none"}, 12 * S + W, 0),
    ({"policy": "every_block"}, 12 * I + (S - I) + W, 1),
    ({"policy": "interval", "interval": 4}, 3 * I + (4 * S - I) + W, 1),
    ({"policy": "interval", "interval": 20}, I + (12 * S - I) + W, 1),
    ({"policy": "interval", "interval": 5}, 3 * I + (5 * S - I) + W, 1),
    ({"policy": "ratio", "ratio": 0.5}, 6 * I + 6 * S + W, 0.5),
    ({"policy": "ratio", "ratio": 1.0}, 12 * I + (S - I) + W, 1),
    ({"policy": "ratio", "ratio": 0.0}, 12 * S + W, 0),
    ({"policy": "sqrt"}, 4 * I + (3 * S - I) + W, 1),
    ({"policy": "hierarchical"}, (4 + 3 - 1) * I + (S - I) + W, 1 + 8 / 12),
    # Of what a block saves, its input and all of K but two widths are kept.
    ({"policy": "selective"}, 12 * (I + K) + (S - I - (K - 2 * I)) + W, 0),
    ({"policy": "memory_budget", "memory_budget": 80 * I}, 80 * I + W, 8 / 12),
    ({"policy": "memory_budget", "memory_budget": 1000 * I}, 12 * S + W, 0),
    ({"policy": "memory_budget", "memory_budget": 1}, 12 * I + (S - I) + W, 1),
    ({"activations_on_cpu": True}, 3 * I + (S - I) + W, 1),
    ({"policy": "sqrt", "activations_on_cpu": True}, 3 * I + (3 * S - I) + W, 1),
    ({"packed_activations": True}, 12 * P + S + I + W, 1),
]


@pytest.mark.parametrize(("keys", "peak", "again"), FORMULAS)
def test_every_policy_is_counted_by_the_guides_formula(keys: dict[str, Any], peak: int, again: float) -> None:
    settings = replace(FP32, **{"recompute": "blocks", **keys})
    kept = activation_bytes(GPT, settings)
    assert kept.layers + W == peak
    assert forwards_again(GPT, settings) == pytest.approx(again)


#: A budget beside the peak, and the recomputed blocks of 12, where a stage holds four micro batches.
BUDGETS = [(4 * 12 * S, 4 * 12 * S, 0), (300 * I, 300 * I, 8), (1, 4 * 12 * I + (S - I), 12)]


@pytest.mark.parametrize(("budget", "peak", "blocks"), BUDGETS)
def test_a_memory_budget_is_for_all_micro_batches_that_a_stage_holds(budget: int, peak: int, blocks: int) -> None:
    settings = replace(FP32, recompute="blocks", policy="memory_budget", memory_budget=budget)
    assert activation_bytes(GPT, settings, live=4).layers == peak
    assert forwards_again(GPT, settings, live=4) == pytest.approx(blocks / 12)


def test_letters_of_the_guide_are_those_of_a_gpt() -> None:
    tokens = FP32.tokens_per_micro_step
    assert block_bytes_per_token(GPT, FP32) * tokens == S
    assert product_bytes_per_token(GPT, FP32) * tokens == K
    assert working_bytes_per_token(GPT, FP32) * tokens == W


def test_what_backward_works_with_takes_the_place_of_logits_where_it_is_more() -> None:
    assert activation_bytes(GPT, FP32).logits == max(W, 128 * 100 * 12) == W
    assert activation_bytes(replace(GPT, vocab=1000), FP32).logits == 128 * 1000 * 12


def test_packed_inputs_on_the_host_are_as_small_there() -> None:
    kept = activation_bytes(GPT, replace(FP32, recompute="blocks", activations_on_cpu=True, packed_activations=True))
    assert kept.on_host == 12 * P
    assert kept.layers == 3 * P + S + I


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
    assert kept.layers == 1024 * (31 * 2 * 4096 + 164 * 1024)


def test_fewer_segments_keep_fewer_inputs_and_more_live_blocks() -> None:
    kept = activation_bytes(LLAMA_3_8B, replace(BF16, recompute="blocks", kept_segments=4))
    assert kept.layers == 1024 * (3 * 2 * 4096 + 8 * 164 * 1024)


def test_on_the_host_lie_all_block_inputs_and_on_the_gpu_three() -> None:
    kept = activation_bytes(LLAMA_3_8B, replace(BF16, recompute="blocks", activations_on_cpu=True))
    assert kept.on_host == 1024 * 32 * 2 * 4096
    assert kept.layers == 1024 * (2 * 2 * 4096 + 164 * 1024)


def test_on_a_disk_lie_all_block_inputs_but_two_and_in_host_memory_as_many_as_there_are_buffers() -> None:
    asked = replace(BF16, recompute="blocks", activations_on_cpu=True, activation_buffers=5)
    kept = activation_bytes(LLAMA_3_8B, asked)
    assert kept.on_host == 1024 * 5 * 2 * 4096
    assert kept.on_disk == 1024 * 30 * 2 * 4096
    assert kept.layers == 1024 * (2 * 2 * 4096 + 164 * 1024)


def test_tensor_parallel_ranks_share_all_but_the_norms() -> None:
    whole = 4 * 4096
    shared = (2 * 4096 + 2 * 1024 + 4 * 14336) // 2
    assert block_bytes_per_token(LLAMA_3_8B, replace(BF16, axis_sizes={"tensor": 2})) == 2 * (whole + shared)


def test_ranks_beyond_the_heads_of_keys_work_with_one_each_and_others_with_whole_heads() -> None:
    """32 heads of queries and 8 of keys: on 16 ranks 2 and 1; on 3 the first two have 3 groups of 4, and of keys 3."""
    cases = {16: (2 * 128, 128, 896), 3: (12 * 128, 3 * 128, 4779), 8: (4 * 128, 128, 1792)}
    for ranks, (queries, keys, inner) in cases.items():
        cut = replace(BF16, axis_sizes={"tensor": ranks})
        assert block_bytes_per_token(LLAMA_3_8B, cut) == 2 * (4 * 4096 + 2 * queries + 2 * keys + 4 * inner), ranks
        assert product_bytes_per_token(LLAMA_3_8B, cut) == 2 * (2 * 4096 + 2 * queries + 2 * keys + 2 * inner), ranks


def test_with_slices_of_the_sequence_no_product_of_a_row_is_kept_but_its_slice() -> None:
    sliced = replace(BF16, axis_sizes={"tensor": 2}, sequence_slices=True)
    assert product_bytes_per_token(LLAMA_3_8B, sliced) == 2 * (4096 + 1024 + 14336)
    assert kept_result_bytes_per_token(LLAMA_3_8B, sliced, keeps_products=True) == 2 * 4096
    kept = activation_bytes(LLAMA_3_8B, replace(sliced, recompute="blocks", policy="selective"))
    whole = block_bytes_per_token(LLAMA_3_8B, sliced) - product_bytes_per_token(LLAMA_3_8B, sliced)
    # Inputs, products and slices of sums of 32 blocks; of the one in backward, what it saves beside products and input.
    assert kept.layers == 1024 * (32 * (2 * 2048 + 2 * 19456 + 2 * 4096) + whole - 2 * 2048)


def test_ranks_that_share_a_sequence_share_its_tokens() -> None:
    assert replace(BF16, axis_sizes={"ulysses": 4}).tokens_per_micro_step == 256
