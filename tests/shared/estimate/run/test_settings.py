"""What of a config decides memory and time."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config import axes
from dsrun.config.axes import AxisRow
from dsrun.config.config import Config
from dsrun.config.load import inspect
from dsrun.errors import ConfigError
from dsrun.estimate.run.settings import RunSettings, read_settings

MICRO = {"train_micro_batch_size_per_gpu": 4}


def settings(raw: dict[str, Any], *, ranks: int = 8, **more: Any) -> RunSettings:
    return read_settings(config(raw), ranks=ranks, **more)


def config(raw: dict[str, Any]) -> Config:
    found = inspect(raw, keep_planned=True).config
    assert found is not None
    return found


def test_stage_format_and_states_come_from_the_config() -> None:
    read = settings(
        {
            **MICRO,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
        sequence=2048,
    )
    assert (read.stage, read.compute_bytes, read.states_per_element, read.has_master) == (2, 2, 2, True)
    assert (read.micro_batch, read.accumulation_steps, read.sequence) == (4, 1, 2048)
    assert (read.planned, read.notes) == ((), ())


@pytest.mark.parametrize(("momentum", "states"), [(0.0, 0), (0.9, 1)])
def test_sgd_keeps_a_state_for_momentum_only(momentum: float, states: int) -> None:
    optimizer = {"type": "SGD", "params": {"lr": 1e-3, "momentum": momentum}}
    assert settings({**MICRO, "optimizer": optimizer}).states_per_element == states


def test_a_section_that_switches_nothing_on_recomputes_nothing() -> None:
    off = {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}}
    assert settings({**MICRO, **off}).recompute == "none"


def test_the_policy_and_what_it_reads_are_taken() -> None:
    def section(**keys: object) -> dict[str, object]:
        return {**MICRO, "activation_checkpointing": keys}

    read = settings(section(policy="interval", interval=4, packing="int8"))
    assert (read.recompute, read.policy, read.interval, read.packed_activations) == ("blocks", "interval", 4, True)
    read = settings(section(policy="memory_budget", memory_budget=10**9, cpu_checkpointing=True))
    assert (read.policy, read.memory_budget, read.activations_on_cpu) == ("memory_budget", 10**9, True)
    assert settings(section(number_checkpoints=3)).kept_segments == 3
    buffer = section(policy="sqrt", contiguous_memory_optimization=True, number_checkpoints=30)
    assert settings(buffer).kept_segments is None
    assert settings(section(policy="memory_budget", memory_budget=10**9), recompute="none").memory_budget is None
    compiled = settings(section(policy="compiler"))
    assert compiled.recompute == "none"
    assert any("torch.compile" in note for note in compiled.notes)


def test_recomputation_that_no_key_asks_for_is_said_to_be_the_scripts() -> None:
    assert any("by the script" in note for note in settings(MICRO, recompute="blocks").notes)


def test_samples_are_as_long_as_the_model_is_made_for() -> None:
    assert settings(MICRO, longest=1024).sequence == 1024
    assert settings(MICRO, longest=32768).sequence == 4096
    read = settings(MICRO, longest=1024, sequence=2048)
    assert read.sequence == 2048
    assert "the model is made for samples of up to 1,024 tokens" in read.notes


def test_planned_keys_are_read_and_named() -> None:
    read = settings(
        {
            **MICRO,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}},
            "tensor_parallel": {"autotp_size": 4},
            "activation_checkpointing": {"partition_activations": True},
        }
    )
    assert (read.offload_optimizer, read.tensor_parallel, read.recompute, read.cut_activations) == (
        "cpu",
        4,
        "blocks",
        True,
    )
    assert set(read.planned) == {"zero_optimization.zenflow"}
    assert not read.can_run


def test_a_batch_is_solved_for_the_ranks_that_see_different_samples() -> None:
    read = settings(
        {"train_batch_size": 64, "gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 4}}, ranks=16
    )
    assert (read.micro_batch, read.accumulation_steps) == (4, 4)


def test_a_given_micro_batch_keeps_the_train_batch() -> None:
    read = settings({"train_batch_size": 64, "gradient_accumulation_steps": 1}, micro_batch=2)
    assert (read.micro_batch, read.accumulation_steps) == (2, 4)


def test_what_the_config_leaves_open_is_said() -> None:
    read = settings({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2})
    assert (read.micro_batch, read.accumulation_steps) == (1, 2)
    assert read.notes == (
        "`--seq` is not given: 4096 tokens a sample",
        '`train_micro_batch_size_per_gpu` is "auto": 1 sample',
        "no `optimizer` in the config: two states an element, as Adam has",
    )


def test_ranks_that_do_not_divide_are_refused_with_the_multiple() -> None:
    with pytest.raises(ConfigError) as error:
        settings({**MICRO, "tensor_parallel": {"autotp_size": 4}}, ranks=6)
    assert error.value.render() == (
        "error: <dict>: `tensor_parallel.autotp_size` is 4; 6 ranks do not divide by tensor parallel 4\n"
        "hint: use a multiple of 4 ranks, or a size that divides 6"
    )


def test_experts_over_more_ranks_than_there_are_are_refused_and_no_such_ranks_fit() -> None:
    experts = {**MICRO, "expert_parallel": {"enabled": True, "autoep_size": 4}}
    with pytest.raises(ConfigError) as error:
        settings(experts, ranks=2)
    assert error.value.render() == (
        "error: <dict>: `expert_parallel.autoep_size` is 4; 2 ranks do not divide by expert parallel 4\n"
        "hint: use a multiple of 4 ranks, or a size that divides 2"
    )
    read = settings(experts, ranks=8)
    assert [ranks for ranks in (1, 2, 4, 6, 8) if read.fits_ranks(ranks)] == [4, 8]
    assert (read.ranks_of("expert", 8), read.ranks_of("batch", 8), read.ranks_of("shard", 8)) == (4, 8, 8)


def test_a_further_axis_divides_the_ranks_of_the_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "AXES", (*axes.AXES, AxisRow("second", "second axis", lambda config: 2, ("pipe",))))
    read = settings({**MICRO, "tensor_parallel": {"autotp_size": 2}}, ranks=8)
    assert (read.ranks_of("pipe", 8), read.ranks_of("batch", 8), read.ranks_of("tensor", 8)) == (2, 2, 2)
    assert (read.tensor_parallel, read.sequence_parallel) == (2, 1)
    assert [ranks for ranks in (2, 4, 6, 8) if read.fits_ranks(ranks)] == [4, 8]


@pytest.mark.parametrize(
    ("pipeline", "counted", "turns"),
    [
        ({}, 3, False),
        ({"stages": 2}, 2, False),
        ({"stages": 2, "schedule": "interleaved", "virtual_stages": 2}, 2, False),
        ({"stages": 2, "schedule": "breadth_first"}, 2, False),
        ({"stages": 2, "schedule": "breadth_first", "virtual_stages": 2}, 3, True),
    ],
)
def test_stage_3_is_counted_as_2_where_parameters_are_held(pipeline: dict[str, Any], counted: int, turns: bool) -> None:
    batch = {**MICRO, "gradient_accumulation_steps": 8, "bf16": {"enabled": True}}
    read = settings({**batch, "pipeline": pipeline, "zero_optimization": {"stage": 3}})
    assert (read.stage, read.chunks_take_turns) == (counted, turns)
    assert any("counted as 2" in note for note in read.notes) == (counted == 2)
    for stage in (0, 1, 2):
        assert settings({**batch, "pipeline": pipeline, "zero_optimization": {"stage": stage}}).stage == stage
