"""A cut model that is compiled: blocks are compiled around their cut modules, once, and nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dsrun
from support.llama import TinyLlama, settings, train
from support.ranks import run_ranks


def body(backend: str | None, dropout: float) -> tuple[list[float], int]:
    """Returns losses, and the number of graphs that were compiled."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    engine: Any = dsrun.initialize(model=TinyLlama(dropout=dropout), config=settings(2))[0]
    try:
        if backend is not None:
            engine.compile(backend=backend)
        losses = train(engine, 0, range(3)).losses
        from torch._dynamo.utils import counters

        return losses, counters["stats"].get("unique_graphs", 0)
    finally:
        engine.destroy()


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.soak("with dropout")), 0.1])
def test_a_compiled_model_trains_as_it_is_and_compiles_no_module_that_is_cut(dropout: float) -> None:
    expected = run_ranks(2, body, None, dropout)
    found = run_ranks(2, body, "aot_eager", dropout)
    assert [losses for losses, _ in found] == [losses for losses, _ in expected]
    for _, graphs in found:
        assert 0 < graphs <= 12, "each cut module, recompiled for its state, would make 25"
