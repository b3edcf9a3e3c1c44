"""One function divides the ranks, for the config, the plan and the runtime."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.axes import axes_of, divide, divides, division_text
from dsrun.config.config import Config
from dsrun.config.load import inspect
from dsrun.errors import ConfigError
from dsrun.estimate.run.settings import read_settings


def planned(settings: dict[str, Any]) -> Config:
    config = inspect({"train_micro_batch_size_per_gpu": 1, **settings}, keep_planned=True).config
    assert config is not None
    return config


def test_all_ranks_share_out_the_data_where_the_config_names_no_other_axis() -> None:
    spec = axes_of(Config(), 6)
    assert spec.views() == [("data",), ()]
    assert {spec.role_size(role) for role in ("world", "replica", "batch", "shard")} == {6}
    assert {spec.role_size(role) for role in ("tensor", "pipe", "context", "expert")} == {1}
    assert division_text(spec) == "all 6 ranks"
    assert division_text(axes_of(Config(), 1)) == "1 rank"


def test_the_data_axis_has_what_the_others_leave() -> None:
    config = planned({"tensor_parallel": {"autotp_size": 4}, "sequence_parallel_size": 2})
    spec = axes_of(config, 32)
    assert [(axis.name, axis.size) for axis in spec.axes] == [("data", 4), ("expert", 1), ("ulysses", 2), ("tensor", 4)]
    assert spec.peers(0, spec.role_axes("tensor")) == (0, 1, 2, 3), "ranks of one host"
    assert (spec.role_size("batch"), spec.role_size("shard"), spec.role_size("context")) == (4, 8, 2)
    assert division_text(spec) == "32 ranks / sequence parallel 2 x tensor parallel 4"


def test_experts_are_spread_over_ranks_that_have_samples_of_their_own() -> None:
    spec = axes_of(planned({"expert_parallel": {"enabled": True, "autoep_size": 4}}), 8)
    assert (spec.size(("data",)), spec.role_size("expert"), spec.role_size("batch")) == (2, 4, 8)
    assert spec.wide(spec.replica_axes(("expert",))) == ("data",)


def test_ranks_that_do_not_divide_are_refused_with_the_multiple() -> None:
    with pytest.raises(ConfigError) as error:
        axes_of(planned({"tensor_parallel": {"tp": {"tp_size": 4}}}), 6)
    assert error.value.render() == (
        "error: <dict>: 6 ranks do not divide by tensor parallel 4\nhint: use a multiple of 4 ranks"
    )
    assert not divides(6, {"tensor": 4})
    assert divides(8, {"tensor": 4})


def test_the_batch_and_the_plan_ask_the_same_function() -> None:
    """Samples of ranks that share them count once, in the config's arithmetic and in the plan's."""
    config = planned({"train_batch_size": 24, "tensor_parallel": {"autotp_size": 2}})
    solved = config.with_world_size(8).batch
    assert solved is not None
    assert (solved.train_batch_size, solved.micro_batch, solved.accumulation_steps) == (24, 1, 6)
    read = read_settings(config, ranks=8)
    assert (read.micro_batch, read.accumulation_steps) == (1, 6)
    assert read.ranks_of("batch", 8) == divide(8, {"tensor": 2}).role_size("batch") == 4
    with pytest.raises(ConfigError, match=r"data-parallel size is 8 ranks / tensor parallel 2"):
        planned(
            {"train_batch_size": 6, "gradient_accumulation_steps": 1, "tensor_parallel": {"autotp_size": 2}}
        ).with_world_size(8)
