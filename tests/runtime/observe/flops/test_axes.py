"""Each rank counts its own part: the sum over pipeline stages and tensor ranks is the whole model's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dsrun.runtime.observe.flops.counter import FlopCount, FlopCounter
from support import llama, pipelines


def count_batch(engine: Any, data_rank: int) -> FlopCount:
    """Counts a global batch of a pipeline, of which forwards count."""
    counter = FlopCounter()
    with counter:
        engine.train_batch(itertools.islice(pipelines.items(data_rank), 100), loss_fn=pipelines.loss_fn)
    return counter.count()


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2)])
def test_pipeline_stages_sum_to_the_whole_model(schedule: str, virtual: int) -> None:
    (whole,) = pipelines.run(pipelines.Case(), count_batch)
    parts = pipelines.run(pipelines.Case(stages=2, schedule=schedule, virtual=virtual), count_batch)
    assert all(part.total.model > 0 for part in parts)
    # The step's own sums, of the norm of gradients, are counted here too and are not the same ones.
    for kind in ("forward", "model", "hardware"):
        assert sum(getattr(part.total, kind) for part in parts) == pytest.approx(getattr(whole.total, kind), rel=1e-3)


def count_forward(engine: Any, data_rank: int) -> FlopCount:
    """Counts a forward of a model that may be cut over the tensor axis."""
    tokens = llama.tokens(0, 0, data_rank)
    counter = FlopCounter()
    with counter:
        engine(tokens[:, :-1])
    return counter.count()


@pytest.mark.parametrize("more", [{}, {"tensor_parallel": {"sequence_parallel": True}}])
def test_tensor_ranks_sum_to_the_whole_model_but_for_layers_that_each_has_whole(more: dict[str, Any]) -> None:
    (whole,) = llama.on_threads(1, 1, count_forward)
    parts = llama.on_threads(2, 2, count_forward, **more)
    head = 2 * llama.MICRO * llama.TIME * llama.llama().lm_head.weight.numel()
    assert sum(part.total.forward for part in parts) == whole.total.forward + head
    assert sum(part.total.model for part in parts) == whole.total.model + 3 * head
