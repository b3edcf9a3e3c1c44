"""What a recomputed block keeps in place of a collective is what a plan counts, and no whole sequence under slices."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dsrun.estimate.model.activations import (
    kept_result_bytes_per_token,
    product_bytes_per_token,
    stored_input_bytes,
)
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.run.settings import RunSettings
from dsrun.runtime.activation.recompute.call import RecomputedCall
from support.llama import MICRO, TIME, llama, on_threads, train

SHAPE = Architecture(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=4, head_dim=16, vocab=64)
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]
TOKENS = MICRO * TIME
FP32_BYTES = 4


def kept_of_a_block(monkeypatch: pytest.MonkeyPatch, tensor: int, *, slices: bool, policy: str) -> tuple[int, int]:
    """Returns (bytes that a call says it keeps, bytes of what it keeps of products and collectives)."""
    found: list[tuple[int, int]] = []
    end = RecomputedCall.end

    def noted(call: Any, output: Any) -> None:
        end(call, output)
        held = [result for result, _ in call.results._results]
        for context in call._contexts:
            held += [getattr(leaf, "val", leaf) for leaf in tree_leaves(dict(getattr(context, "storage", {})))]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in _tensors(held)}
        if call.name == "layers.1":  # the first one of a row is given the whole sequence
            found.append((call.kept_bytes, sum(storages.values())))

    monkeypatch.setattr(RecomputedCall, "end", noted)
    on_threads(
        tensor,
        tensor,
        lambda engine, data_rank: train(engine, data_rank, range(1)),
        make=lambda: llama(heads=4, key_heads=4, inner=128, bias=False),
        tensor_parallel={"sequence_parallel": slices},
        activation_checkpointing={"policy": policy},
    )
    return found[-1]


def _tensors(values: list[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def settings_of(tensor: int, *, slices: bool, policy: Any) -> RunSettings:
    return RunSettings(
        axis_sizes={"tensor": tensor},
        sequence_slices=slices,
        micro_batch=MICRO,
        sequence=TIME,
        recompute="blocks",
        policy=policy,
    )


@pytest.mark.parametrize(("tensor", "slices"), LAYOUTS)
def test_a_recomputed_block_keeps_its_input_and_its_sums(
    tensor: int, slices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tensor, slices=slices, policy="every_block")
    results = TOKENS * kept_result_bytes_per_token(SHAPE, settings, keeps_products=False)
    kept, in_results = kept_of_a_block(monkeypatch, tensor, slices=slices, policy="every_block")
    assert (kept, in_results) == (stored_input_bytes(SHAPE, settings) + results, results)


@pytest.mark.parametrize(("tensor", "slices"), LAYOUTS)
def test_a_block_that_keeps_products_keeps_slices_of_its_sums_in_place_of_whole_ones(
    tensor: int, slices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tensor, slices=slices, policy="selective")
    products = product_bytes_per_token(SHAPE, settings)
    expected = TOKENS * (products + kept_result_bytes_per_token(SHAPE, settings, keeps_products=True))
    # The logarithm of a sum for each head of attention is kept with its output.
    statistics = TOKENS * FP32_BYTES * SHAPE.heads // tensor
    _, held = kept_of_a_block(monkeypatch, tensor, slices=slices, policy="selective")
    assert held == expected + statistics


@pytest.mark.parametrize("bias", [False, True])
def test_a_block_that_has_let_go_of_its_partial_sums_trains_as_one_that_keeps_all(bias: bool) -> None:
    def trained(policy: str) -> Any:
        return on_threads(
            2,
            2,
            lambda engine, data_rank: train(engine, data_rank, range(2)),
            make=lambda: llama(heads=4, key_heads=2, inner=128, bias=bias),
            tensor_parallel={"sequence_parallel": True},
            activation_checkpointing={"policy": policy},
        )[0]

    kept, made_again = trained("none"), trained("selective")
    assert (made_again.losses, made_again.norms) == (kept.losses, kept.norms)
    assert all(made_again.weights[name].equal(weight) for name, weight in kept.weights.items())
