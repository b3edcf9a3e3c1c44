"""The example of pipeline stages under the real launcher: two stages train with the bits of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.example_runs import run_example


def test_two_stages_name_themselves_and_have_the_losses_and_norms_of_one_to_the_bit(tmp_path: Path) -> None:
    one, two = (
        run_example(
            tmp_path / f"{stages}",
            "pipeline",
            *("--steps", "3"),
            ranks=stages,
            layers=4,
            config={"pipeline": {"stages": stages}},
        )
        for stages in (1, 2)
    )
    assert len(one.steps) == 3
    assert two.steps == one.steps
    assert two.flops_a_token == pytest.approx(one.flops_a_token, rel=1e-4), "operations of all stages"

    assert "the first of 2 pipeline stages" in two.out
    line = "dsrun: pipeline of 2 stages: layers 0 to 1 | 2 to 3; 1f1b over 8 micro batches, bubble 11.1 %"
    assert two.out.count(line) == 1
    (record,) = (record for record in two.records if record["event"] == "pipeline")
    assert record["layers"] == [[0, 2], [2, 4]]
    assert record["stage_of_chunk"] == [0, 1]
    assert (record["schedule"], record["micro_batches"], record["live_micro_batches"]) == ("1f1b", 8, 2)
