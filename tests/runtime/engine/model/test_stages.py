"""`pipeline.stages` "auto" is what the script's model says: its PipelineModule's stages, and one for a plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from dsrun.errors import ConfigError
from dsrun.pipe import LayerSpec, PipelineModule
from dsrun.runtime.parallel.pipeline.ranks import JobRank
from dsrun.runtime.parallel.pipeline.topology import PipeDataParallelTopology
from support.pipelines import Case, Layer, Tokens, loss_fn, run, train

FOUR = Case(stages=2, data=2)


def listed(**words: Any) -> Callable[[int], nn.Module]:
    def of_rank(rank: int) -> nn.Module:
        layers = [LayerSpec(Tokens), *(LayerSpec(Layer, 0.0) for _ in range(4)), LayerSpec(nn.Linear, 32, 37)]
        return PipelineModule(layers, loss_fn=loss_fn, job=JobRank(rank, 4), **words)

    return of_rank


def told(engine: Any, data_rank: int) -> tuple[int, int, int, list[float]]:
    """Stages, ranks with samples of their own, samples of a global batch, losses."""
    losses = train(engine, data_rank, updates=1).losses
    return engine.num_stages, engine.dp_world_size, engine.train_batch_size(), losses


@pytest.mark.parametrize("more", [{}, {"pipeline": {"stages": "auto"}}, {"pipeline": {"seed_layers": True}}])
@pytest.mark.parametrize("words", [{"num_stages": 2}, {"topology": PipeDataParallelTopology(2, 2)}])
def test_auto_is_the_stages_of_the_scripts_list_of_layers(words: dict[str, Any], more: dict[str, Any]) -> None:
    expected = run(FOUR, told, of_rank=listed(num_stages=2))
    found = run(Case(stages=2, data=2, plain=True, more=more), told, of_rank=listed(**words))
    assert found == expected
    assert expected[0][:3] == (2, 2, 2 * 4 * 2)


@pytest.mark.parametrize("more", [{}, {"pipeline": {"stages": "auto"}}])
def test_auto_is_one_stage_of_a_plain_model(more: dict[str, Any]) -> None:
    found = run(Case(stages=1, data=4, plain=True, more=more), told)
    assert [one[:3] for one in found] == [(1, 4, 2 * 4 * 4)] * 4


def test_another_number_than_that_of_the_list_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`pipeline\.stages` is 4, and the script's PipelineModule has 2"):
        run(Case(stages=4), told, of_rank=listed(num_stages=2))
