"""One function divides the ranks, for the config, the plan and the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsrun.config import axes
from dsrun.config.axes import AxisRow, axes_of, coordinate_text, divide, divides, division_text
from dsrun.config.config import Config
from dsrun.config.findings import Severity
from dsrun.config.load import inspect, load
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
    assert [(axis.name, axis.size) for axis in spec.axes] == [
        ("pipe", 1),
        ("data", 4),
        ("expert", 1),
        ("ring", 1),
        ("ulysses", 2),
        ("tensor", 4),
    ]
    assert spec.peers(0, spec.role_axes("tensor")) == (0, 1, 2, 3), "ranks of one host"
    assert (spec.role_size("batch"), spec.role_size("shard"), spec.role_size("context")) == (4, 8, 2)
    assert division_text(spec) == "32 ranks / sequence parallel 2 x tensor parallel 4"


def test_stages_are_the_slowest_axis_and_divide_the_ranks_with_samples() -> None:
    config = planned(
        {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, "gradient_accumulation_steps": 8}
    )
    spec = axes_of(config, 16)
    assert spec.peers(0, spec.role_axes("pipe")) == (0, 8), "neighbouring stages are as far apart as can be"
    assert {role: spec.role_size(role) for role in ("pipe", "batch", "shard", "replica")} == {
        "pipe": 2,
        "batch": 4,
        "shard": 4,
        "replica": 8,
    }
    assert [spec.stage_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert division_text(spec) == "16 ranks / pipeline 2 x tensor parallel 2"
    solved = config.with_world_size(16).batch
    assert solved is not None
    assert solved.train_batch_size == 8 * 4
    with pytest.raises(ConfigError, match=r"`pipeline.stages` is 4; 6 ranks do not divide by pipeline 4"):
        load({"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 4}}, world_size=6)


def test_a_coordinate_has_the_axes_with_several_ranks_and_is_left_out_where_data_is_the_only_one() -> None:
    assert [coordinate_text(divide(4, {}), rank) for rank in range(4)] == [""] * 4
    assert coordinate_text(divide(1, {}), 0) == ""
    assert [coordinate_text(divide(4, {"tensor": 2}), rank) for rank in range(4)] == [
        "data 0, tensor 0",
        "data 0, tensor 1",
        "data 1, tensor 0",
        "data 1, tensor 1",
    ]
    assert [coordinate_text(divide(2, {"pipe": 2}), rank) for rank in range(2)] == ["pipe 0", "pipe 1"]
    most = divide(1024**5, dict.fromkeys(("pipe", "expert", "ulysses", "tensor"), 1024))
    longest = coordinate_text(most, 1024**5 - 1)
    assert longest == "pipe 1023, data 1023, expert 1023, ulysses 1023, tensor 1023"
    assert len(longest) <= 64, "of more a heartbeat keeps the beginning alone"


def test_experts_are_spread_over_ranks_that_have_samples_of_their_own() -> None:
    spec = axes_of(planned({"expert_parallel": {"enabled": True, "autoep_size": 4}}), 8)
    assert (spec.size(("data",)), spec.role_size("expert"), spec.role_size("batch")) == (2, 4, 8)
    assert spec.wide(spec.replica_axes(("expert",))) == ("data",)


def test_ranks_that_do_not_divide_are_refused_with_the_multiple() -> None:
    with pytest.raises(ConfigError) as error:
        axes_of(planned({"tensor_parallel": {"tp": {"tp_size": 4}}}), 6)
    assert error.value.render() == (
        "error: <dict>: `tensor_parallel.tp.tp_size` is 4; 6 ranks do not divide by tensor parallel 4\n"
        "hint: use a multiple of 4 ranks, or a size that divides 6"
    )
    assert not divides(6, {"tensor": 4})
    assert divides(8, {"tensor": 4})


def test_of_several_sizes_all_are_named_and_the_first_that_does_not_divide_is_the_place(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"sequence_parallel_size": 2,\n "tensor_parallel": {\n  "autotp_size": 2}}')
    config = inspect(path, keep_planned=True).config
    assert config is not None
    with pytest.raises(ConfigError) as error:
        axes_of(config, 6)
    assert error.value.render() == (
        f"error: {path}:3:3: `sequence_parallel_size` is 2 and `tensor_parallel.autotp_size` is 2; "
        "6 ranks do not divide by sequence parallel 2 x tensor parallel 2\n"
        "hint: use a multiple of 4 ranks, or sizes whose product divides 6"
    )


@pytest.mark.parametrize("batch", ['"train_batch_size": 7', '"train_batch_size": "auto"'])
def test_a_config_whose_axes_do_not_divide_the_ranks_says_it_once_at_the_axis(batch: str, tmp_path: Path) -> None:
    """What the batch comes to cannot be known then, and nothing is said of it."""
    path = tmp_path / "ds.json"
    path.write_text(f'{{{batch},\n "gradient_clipping": 1.0,\n "tensor_parallel": {{"autotp_size": 2}}}}')
    found = inspect(path, world_size=3)
    assert found.config is None
    (division,) = [one for one in found.findings if one.severity is Severity.ERROR]
    assert division.key == "tensor_parallel.autotp_size"
    assert str(division.position) == f"{path}:3:22"
    assert division.message == "`tensor_parallel.autotp_size` is 2; 3 ranks do not divide by tensor parallel 2"
    assert [one for one in found.findings if one.severity is Severity.WARNING] == []


@pytest.mark.parametrize(
    "axis",
    [
        {"sequence_parallel_size": 2},
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    ],
)
def test_an_axis_that_is_refused_is_not_said_to_divide_badly_too(axis: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        load({"train_batch_size": 7, **axis}, world_size=3)
    (problem,) = error.value.problems
    assert problem.message.endswith(" yet")
    assert problem.message.count("<dict>: ") == 1


def test_an_axis_that_is_built_is_refused_at_its_key_where_ranks_do_not_divide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = AxisRow("second", "second axis", lambda config: config.steps_per_print or 1, (), keys=("steps_per_print",))
    monkeypatch.setattr(axes, "AXES", (*axes.AXES, row))
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 7,\n "steps_per_print": 2}')
    with pytest.raises(ConfigError) as error:
        load(path, world_size=3)
    assert error.value.render() == (
        f"error: {path}:2:2: `steps_per_print` is 2; 3 ranks do not divide by second axis 2\n"
        "hint: use a multiple of 2 ranks, or a size that divides 3"
    )
    with pytest.raises(ConfigError, match=r":1:2: `train_batch_size` 7 is no multiple"):
        load(path, world_size=4)


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


def test_of_several_sizes_that_do_not_divide_the_first_is_the_place(tmp_path: Path) -> None:
    """Neither 4 stages nor 4 of them with 2 ranks a layer divide 6 ranks; 2 ranks a layer alone would."""
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_micro_batch_size_per_gpu": 1,\n "tensor_parallel": {\n  "autotp_size": 2},\n'
        ' "pipeline": {\n  "stages": 4}}'
    )
    found = inspect(path, world_size=6)
    (division,) = [one for one in found.findings if one.severity is Severity.ERROR]
    assert (division.key, str(division.position)) == ("pipeline.stages", f"{path}:5:3")
    assert division.message == (
        "`pipeline.stages` is 4 and `tensor_parallel.autotp_size` is 2; "
        "6 ranks do not divide by pipeline 4 x tensor parallel 2"
    )
