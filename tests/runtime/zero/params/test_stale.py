"""What a slot has kept over a step: no operation of a script's reads it, and who reads memory itself finds NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dsrun
from dsrun.runtime.zero.partition_parameters import memory_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train


def _norms(engine: Any) -> list[float]:
    return [float(param.detach().norm()) for param in engine.module.parameters() if param.numel()]


def test_norms_of_parameters_after_a_step_are_right() -> None:
    engine = make_engine(config(3, micro=2))
    for step in range(3):
        train(engine, range(step, step + 1), samples=2)
        found = _norms(engine)
        with dsrun.zero.GatheredParameters(engine.module.parameters()):
            right = _norms(engine)
        assert torch.tensor(right).isfinite().all()
        assert found == right


def test_memory_of_parameters_that_no_operation_asks_for_is_marked_after_a_step() -> None:
    """Kernels that are given an address go past everything; a mark shows where they reduce over a parameter."""
    engine = make_engine(config(3, micro=2))
    train(engine, range(2), samples=2)
    in_blocks = [p for p in engine.module.blocks.parameters() if p.numel()]
    assert in_blocks
    assert all(bool(memory_of(p).norm().isnan()) for p in in_blocks)


def test_units_that_only_evaluate_keep_their_values() -> None:
    engine = dsrun.initialize(
        model=TinyGPT().requires_grad_(False),
        config={"train_batch_size": 1, "zero_optimization": {"stage": 3}},
    )[0]
    with torch.no_grad():
        outputs = [engine(torch.zeros(1, 4, dtype=torch.int64)) for _ in range(2)]
    assert torch.equal(*outputs)


def _with_frozen(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Blocks of which frozen parameters stay valid in their slots over the steps."""
    torch.manual_seed(3)
    model = TinyGPT()
    for block in model.blocks:
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.requires_grad_(False)
    engine = make_engine(config(stage, micro=2), model=model)
    losses = train(engine, range(4), samples=2 * engine.world_size)
    return losses, full_parameters(engine)


def test_frozen_parameters_that_stay_in_a_slot_keep_their_bits() -> None:
    (losses, values), _ = run_ranks(2, _with_frozen, 3)
    (expected_losses, expected), _ = run_ranks(2, _with_frozen, 1)
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(values[name], value), name
