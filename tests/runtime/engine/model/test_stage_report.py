"""What a run says of its stages at its start: with and without costs, and in a line."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from dsrun.config.load import load
from dsrun.runtime.engine.model.stage_report import pipeline_line, pipeline_record
from dsrun.runtime.parallel.pipeline.cut import cut_model
from dsrun.runtime.parallel.pipeline.stages import Stages


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def record(partition: Any, **keys: Any) -> dict[str, Any]:
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    config = load({**settings, "pipeline": {"stages": 2, "partition": partition, **keys}}, world_size=2)
    virtual = config.pipeline.chunks_per_rank
    cut = cut_model(Model(), rank=0, rank_of=(0, 1) * virtual, partition=partition)
    stages: Stages = cut
    return pipeline_record(stages, cut.partition, config)


def test_a_record_has_layers_costs_bubble_and_live_micro_batches() -> None:
    found = record("cost")
    assert found["cost_shares"] == [0.5, 0.5]
    assert (found["layers"], found["bubble"], found["live_micro_batches"]) == ([[0, 2], [2, 4]], 0.1111, 2)
    line = "dsrun: pipeline of 2 stages: layers 0 to 1 | 2 to 3; 1f1b over 8 micro batches, bubble 11.1 %"
    assert pipeline_line(found) == line


@pytest.mark.parametrize("partition", ["uniform", "type:Sequential", [0, 1, 4]], ids=str)
def test_layers_that_were_not_weighed_have_no_costs(partition: Any) -> None:
    found = record(partition)
    assert found["cost_shares"] == []
    expected = [[0, 1], [1, 4]] if isinstance(partition, list) else [[0, 2], [2, 4]]
    assert found["layers"] == expected


def test_a_line_names_single_layers_and_chunks() -> None:
    found = pipeline_line(record("uniform", virtual_stages=2))
    assert "2 stages, 2 chunks a stage: layers 0 | 1 | 2 | 3; interleaved" in found
