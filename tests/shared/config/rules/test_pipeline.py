"""A pipeline that cannot run, costs too much or waits too long is told before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.findings import Finding, Severity
from dsrun.config.load import inspect, load
from dsrun.config.provenance import Kind
from dsrun.errors import ConfigError, Problem
from dsrun.pipeline_schedules.generate import make_schedule


def of(pipeline: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "pipeline": pipeline,
        **others,
    }


def found(settings: dict[str, Any], world_size: int = 8) -> tuple[Finding, ...]:
    return inspect(settings, world_size=world_size).findings


def the_error(settings: dict[str, Any], world_size: int = 8) -> Finding:
    (error,) = [finding for finding in found(settings, world_size) if finding.severity is Severity.ERROR]
    return error


def test_the_defaults_are_one_stage() -> None:
    section = load({"train_micro_batch_size_per_gpu": 1}, world_size=2).pipeline
    assert (section.count, section.schedule_name, section.chunks_per_rank, section.chunks) == (1, "1f1b", 1, 1)
    assert (section.partition, section.boundary_dtype, section.seeds_layers) == ("cost", None, False)


@pytest.mark.parametrize(
    ("pipeline", "schedule", "chunks"),
    [
        ({}, "1f1b", 4),
        ({"schedule": "auto"}, "1f1b", 4),
        ({"virtual_stages": 2}, "interleaved", 8),
        ({"schedule": "breadth_first", "virtual_stages": 3}, "breadth_first", 12),
        ({"schedule": "zero_bubble"}, "zero_bubble", 4),
        ({"schedule": "zbv"}, "zbv", 8),
        ({"schedule": "zbv", "virtual_stages": 2}, "zbv", 8),
    ],
)
def test_auto_and_zbv_choose_schedule_and_chunks(pipeline: dict[str, Any], schedule: str, chunks: int) -> None:
    config = load(of({"stages": 4, **pipeline}), world_size=8)
    assert (config.pipeline.schedule_name, config.pipeline.chunks) == (schedule, chunks)
    assert config.pipeline.seeds_layers
    assert [finding.render() for finding in config.findings] == []
    assert config.batch is not None
    assert config.batch.train_batch_size == 8 * 2, "four stages of eight ranks leave two with samples of their own"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("best", "cost"),
        ("Uniform", "uniform"),
        ("type:Block|Layer", "type:Block|Layer"),
        ("TYPE:block", "type:block"),
        ([0, 5, 12], (0, 5, 12)),
    ],
)
def test_partitions_are_read_in_deepspeeds_spellings_and_as_bounds(written: Any, read: Any) -> None:
    assert load(of({"stages": 2, "partition": written})).pipeline.partition == read


@pytest.mark.parametrize(
    "partition", ["profile", "type:", "type:[", [0], [1, 2, 3], [0, 3, 2], [0, 0, 8], [0, 8, 8], [0, 1.5, 2], [], 3]
)
def test_a_partition_that_is_none_is_refused(partition: Any) -> None:
    error = the_error(of({"stages": 2, "partition": partition}))
    assert error.key == "pipeline.partition"
    assert error.message.endswith("or a list of whole numbers, 0 first and each larger than the one before")


@pytest.mark.parametrize(
    ("virtual", "partition", "words", "numbers"),
    [
        (1, [0, 4], "[0, 4] bounds 1 chunk; expected 2, one for each of 2 stages", 3),
        (2, [0, 3, 6], "[0, 3, 6] bounds 2 chunks; expected 4, 2 for each of 2 stages", 5),
    ],
)
def test_bounds_are_as_many_as_the_chunks_want(virtual: int, partition: list[int], words: str, numbers: int) -> None:
    error = the_error(of({"stages": 2, "virtual_stages": virtual, "partition": partition}))
    assert error.message == f"`pipeline.partition`: {words}"
    assert error.hint == f"write {numbers} numbers: the first layer of each chunk, and the number of layers"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_schedules_of_one_chunk_a_rank_refuse_more(schedule: str) -> None:
    error = the_error(of({"stages": 2, "schedule": schedule, "virtual_stages": 2}))
    assert error.message == f"`pipeline.virtual_stages` is 2, and the schedule `{schedule}` has one chunk a rank"
    assert error.hint == 'leave it out, or write `pipeline.schedule` "interleaved" or "breadth_first"'


@pytest.mark.parametrize("virtual", [1, 3])
def test_zbv_has_two_chunks(virtual: int) -> None:
    error = the_error(of({"stages": 2, "schedule": "zbv", "virtual_stages": virtual}))
    assert error.message == f"`pipeline.virtual_stages` is {virtual}, and the schedule `zbv` has two chunks a rank"


def test_interleaved_takes_multiples_of_the_stages_alone() -> None:
    error = the_error(of({"stages": 4, "virtual_stages": 2}, gradient_accumulation_steps=6))
    assert error.message == (
        "`gradient_accumulation_steps` is 6; the schedule `interleaved` takes a multiple of the 4 stages of "
        "`pipeline.stages`"
    )
    assert error.hint == 'take 4 or 8 micro batches, or `pipeline.schedule` "breadth_first" for any number'
    with pytest.raises(ConfigError) as refused:
        make_schedule("interleaved", ranks=4, micros=6, virtual=2)
    assert refused.value.problems == (Problem(error.message, error.hint),), "whoever tells it, it is one text"


def test_a_number_that_follows_from_the_batch_is_judged_too() -> None:
    settings = of({"stages": 4, "virtual_stages": 2}, train_batch_size=12)
    del settings["gradient_accumulation_steps"]
    error = the_error(settings)  # two ranks with samples of their own
    assert error.message.startswith("the batch sizes come to 6 micro batches; the schedule `interleaved` takes")
    assert error.hint is not None
    assert error.hint.startswith("take 4 or 8 micro batches, or ")
    assert inspect(settings).config is not None, "without the number of ranks nothing can be said"


def test_fewer_micro_batches_than_stages_are_warned_of_with_what_ranks_wait() -> None:
    """1F1B waits (p-1)/(M+p-1) of a step: 3/5 with two micro batches on four stages, 3/19 with sixteen."""
    (warning,) = found(of({"stages": 4}, gradient_accumulation_steps=2))
    assert warning.severity is Severity.WARNING
    assert warning.message == (
        "`gradient_accumulation_steps` is 2 on 4 pipeline stages: each rank waits for 60% of a step, under the "
        "schedule `1f1b`"
    )
    assert warning.hint == "4 micro batches a stage, 16, bring that to 16%"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "breadth_first", "zero_bubble", "zbv"])
def test_every_schedule_is_warned_of_with_few_micro_batches(schedule: str) -> None:
    (warning,) = found(of({"stages": 4, "schedule": schedule}, gradient_accumulation_steps=1))
    assert "`gradient_accumulation_steps` is 1 on 4 pipeline stages: each rank waits for" in warning.message


def test_stage_2_is_noted_to_hold_whole_sums_as_1_does() -> None:
    (note,) = found(of({"stages": 2}, zero_optimization={"stage": 2}))
    assert note.severity is Severity.NOTE
    assert note.message.startswith("`zero_optimization.stage` 2 holds the sums of gradients whole, as 1 does, with 2")


def test_stage_3_is_noted_to_hold_parameters_as_2_with_the_bytes_of_the_other_way() -> None:
    """8 micro batches x 3 x 2 bytes / 2 stages = 24 bytes a parameter; in turns two gathers and fp32 sums, 8 / 2."""
    settings = of({"stages": 2}, zero_optimization={"stage": 3}, bf16={"enabled": True})
    (note,) = found(settings)
    assert (note.severity, note.key) == (Severity.NOTE, "zero_optimization.stage")
    assert note.message.startswith(
        "`zero_optimization.stage` 3 holds parameters as 2 does with 2 pipeline stages under"
    )
    assert note.message.endswith(
        "M x 3 x 2N/2 bytes a rank and update, of N parameters and M micro batches: 24 bytes a parameter, where "
        "chunks that take turns move 4"
    )
    config = load(settings, world_size=8)
    assert (config.gathers_chunks, config.cutting_stage) == (False, 2)


@pytest.mark.parametrize(("precision", "each", "once"), [("fp16", 2, 8), ("bf16", 2, 8), ("fp32", 4, 12)])
def test_without_a_number_of_micro_batches_the_bytes_are_told_by_it(precision: str, each: int, once: int) -> None:
    """A gather is of the model's format, three of them a micro batch; in turns there are two, and sums in fp32."""
    formats = {} if precision == "fp32" else {precision: {"enabled": True}}
    settings = of({"stages": 2}, zero_optimization={"stage": 3}, train_batch_size=64, **formats)
    del settings["gradient_accumulation_steps"]
    (note,) = inspect(settings).findings
    assert note.message.endswith(
        f"M x 3 x {each}N/2 bytes a rank and update, of N parameters and M micro batches, where chunks that take "
        f"turns move {once}N/2"
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_2_and_3_hold_less_where_chunks_take_turns(stage: int) -> None:
    settings = of({"stages": 2, "schedule": "breadth_first", "virtual_stages": 2}, zero_optimization={"stage": stage})
    assert found(settings) == ()
    config = load(settings, world_size=8)
    assert (config.gathers_chunks, config.cutting_stage) == (stage == 3, stage)


@pytest.mark.parametrize(
    ("virtual", "data_ranks", "share"),
    [(2, 1, "1.5"), (2, 2, "1"), (2, 3, None), (3, 3, "1"), (3, 4, None), (4, 1, "1.5"), (4, 2, "1"), (5, 2, None)],
)
def test_turns_that_hold_more_than_whole_parameters_are_noted(virtual: int, data_ranks: int, share: str | None) -> None:
    turns = {"stages": 2, "schedule": "breadth_first", "virtual_stages": virtual}
    notes = found(of(turns, zero_optimization={"stage": 3}), world_size=2 * data_ranks)
    assert len(notes) == (share is not None)
    for note in notes:
        assert (note.severity, note.key) == (Severity.NOTE, "zero_optimization.stage")
        assert note.message.endswith(f"gathered chunks take {share} times the parameters of a stage")
        assert note.hint is not None
        assert ("`pipeline.virtual_stages`" in note.hint) == (data_ranks > 1)
    one_set = {"stage": 3, "stage3_prefetch_bucket_size": 0}
    assert (found(of(turns, zero_optimization=one_set), world_size=2 * data_ranks) == ()) == (
        1 / data_ranks + 1 / virtual < 1
    )
    on_host = {"stage": 3, "offload_param": {"device": "cpu"}}
    assert found(of(turns, zero_optimization=on_host, bf16={"enabled": True}), world_size=2 * data_ranks) == ()


def test_one_chunk_a_rank_takes_no_turns() -> None:
    settings = of({"stages": 2, "schedule": "breadth_first"}, zero_optimization={"stage": 3})
    (note,) = found(settings)
    assert note.hint is not None
    assert note.hint.endswith(
        '"breadth_first" and a larger `pipeline.virtual_stages`, where chunks take turns; that keeps the activations '
        "of all micro batches: compare with `dsrun plan`"
    )
    assert load(settings, world_size=8).cutting_stage == 2


def test_keys_of_stage_3_are_warned_of_where_parameters_are_whole() -> None:
    zero = {"stage": 3, "stage3_max_live_parameters": 1000}
    warning, _ = sorted(found(of({"stages": 2}, zero_optimization=zero)), key=lambda finding: finding.key)[::-1]
    assert warning.severity is Severity.WARNING
    assert warning.message == (
        "`zero_optimization.stage3_max_live_parameters` has no effect where state is held as at "
        "`zero_optimization.stage` 2, only at 3"
    )
    turns = {"stages": 2, "schedule": "breadth_first", "virtual_stages": 2}
    assert found(of(turns, zero_optimization=zero)) == ()


def test_parameters_leave_the_device_only_where_chunks_take_turns() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    settings = of({"stages": 2}, zero_optimization=zero, bf16={"enabled": True})
    error = the_error(settings)
    assert error.key == "zero_optimization.offload_param.device"
    assert "24 bytes a parameter" in error.message
    assert len(found(settings)) == 1, "what is refused is told once"
    turns = {"stages": 2, "schedule": "breadth_first", "virtual_stages": 2}
    assert load(of(turns, zero_optimization=zero, bf16={"enabled": True}), world_size=8).gathers_chunks


def test_of_layers_that_ranks_share_each_rank_gathers_its_part() -> None:
    """8 micro batches x 3 x 4 bytes / (2 stages x 2 ranks a layer) = 24; chunks in turns (2 x 4 + 4) / 4 = 3."""
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    settings = of({"stages": 2}, zero_optimization=zero, tensor_parallel={"autotp_size": 2})
    assert "M x 3 x 4N/4 bytes a rank and update" in the_error(settings).message
    assert the_error(settings).message.endswith("24 bytes a parameter, where chunks that take turns move 3")


def test_gradients_are_reduced_once_an_update_where_there_are_stages() -> None:
    assert not load(of({})).reduces_once_an_update
    assert load(of({"stages": 2})).reduces_once_an_update
    assert load(of({}, gradient_reduction="update")).reduces_once_an_update
    error = the_error(of({"stages": 2}, gradient_reduction="micro_step"))
    assert error.message.startswith('`gradient_reduction` is "micro_step" with 2 pipeline stages')


def test_keys_of_deepspeed_that_change_nothing_are_noted() -> None:
    keys = {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}
    findings = found(of({"stages": 2, **keys}))
    assert [(one.severity, one.key) for one in findings] == [(Severity.NOTE, f"pipeline.{key}") for key in keys]
    assert found(of({"stages": 2, **dict.fromkeys(keys, True)})) == ()


def test_a_boundary_in_a_narrower_format_is_noted() -> None:
    (note,) = found(of({"stages": 2, "boundary_dtype": "bf16"}))
    assert note.message.endswith("is not the format of the model: results differ from those of one stage")
    assert found(of({"stages": 2, "boundary_dtype": "bf16"}, bf16={"enabled": True})) == ()
    assert found(of({"stages": 2, "boundary_dtype": "fp32"}, bf16={"enabled": True})) == ()


def test_layers_are_chosen_for_recomputation_in_one_place() -> None:
    settings = of(
        {"stages": 2, "activation_checkpoint_interval": 2}, activation_checkpointing={"policy": "every_block"}
    )
    assert the_error(settings).key == "pipeline.activation_checkpoint_interval"


@pytest.mark.parametrize("pipeline", [{}, {"stages": "auto"}, {"stages": 2}])
def test_the_scripts_model_says_the_stages_before_the_batch_is_solved(pipeline: dict[str, Any]) -> None:
    config = load(of(pipeline), world_size=4, pipeline_stages=2)
    assert config.pipeline.count == 2
    assert config.batch is not None
    assert config.batch.train_batch_size == 8 * 2
    source = config.provenance["pipeline.stages"]
    if pipeline.get("stages") == 2:
        assert source.kind is Kind.FILE
    else:
        assert (source.kind, source.detail) == (Kind.DERIVED, "from the script's PipelineModule")


def test_a_config_that_says_another_number_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        load(of({"stages": 4}), world_size=4, pipeline_stages=2)
    assert error.value.render() == (
        "error: <dict>: `pipeline.stages` is 4, and the script's PipelineModule has 2; expected the same number\n"
        'hint: leave it out, or give PipelineModule "num_stages=4"'
    )


def test_a_batch_that_fits_no_ranks_but_those_of_a_stage_waits_for_the_scripts_model() -> None:
    """The launcher knows no model: with two stages of four ranks, two have samples of their own."""
    settings = of({"stages": "auto"}, train_batch_size=16)
    (warning,) = found(settings, world_size=4)
    assert warning.severity is Severity.WARNING
    assert 'data-parallel size is all 4 ranks, `pipeline.stages` "auto" counted as 1; ' in warning.message
    assert load(settings, world_size=4, pipeline_stages=2).batch is not None
    with pytest.raises(ConfigError, match="`train_batch_size` 16 != "):
        load(settings, world_size=4)


@pytest.mark.parametrize("pipeline", [{"stages": "auto"}, {"schedule": "gpipe"}])
def test_where_the_script_says_the_stages_a_check_says_what_it_counts(pipeline: dict[str, Any]) -> None:
    (note,) = found(of(pipeline), world_size=4)
    assert (note.severity, note.key) == (Severity.NOTE, "pipeline.stages")
    assert note.message == (
        "`pipeline.stages` is left to the script: counted as 1, which is so unless it has a PipelineModule, or a "
        "launch plans more"
    )
    assert inspect(of(pipeline)).findings == (), "nothing is counted before the ranks are known"
    assert load(of(pipeline), world_size=4, pipeline_stages=2).findings == ()


@pytest.mark.parametrize("pipeline", [{"stages": "auto"}, {"schedule": "gpipe"}])
def test_planned_stages_count_unless_the_script_has_its_own(pipeline: dict[str, Any]) -> None:
    config = load(of(pipeline), world_size=4, planned={"pipe": 2})
    assert (config.pipeline.stages, config.batch and config.batch.train_batch_size) == (2, 8 * 2)
    assert config.provenance["pipeline.stages"].detail == "the fastest that fits, by the plan of the launch"
    assert load(of(pipeline), world_size=4, planned={"pipe": 2}, pipeline_stages=4).pipeline.stages == 4
    assert load(of(pipeline), world_size=4, planned={"pipe": 1}).pipeline.stages == "auto", "one stage is no pipeline"


def test_a_config_without_a_pipeline_assumes_nothing_of_one() -> None:
    settings = of({})
    del settings["pipeline"]
    assert found(settings, world_size=4) == ()
