"""The settings that fit with the fewest changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.estimate.model.units import from_count
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.catalogue import CAUTIOUS
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.nearest import nearest
from support.planned_machines import gpus

GIB = 1 << 30
MODEL = from_count(7 * 10**9)
BF16 = RunSettings(compute_bytes=2, sequence=2048, micro_batch=8)


def test_the_nearest_that_fit_change_as_little_as_can_be() -> None:
    machine = gpus("A100-80G")
    settings = replace(BF16, stage=0, micro_batch=1)
    choices = nearest(MODEL, settings, machine, most_ranks=8)
    assert predict(MODEL, settings, machine).fits is False
    assert choices[0].changes == (("zero_optimization.stage", 1),)
    assert all(choice.prediction.fits is not False for choice in choices)


def test_the_nearest_may_use_fewer_ranks_where_they_share_one_memory() -> None:
    host = Machine(label="cpu", ranks=4, ranks_per_host=4, host_memory_bytes=20 * GIB)
    model = replace(from_count(10**9), architecture=None)
    choices = nearest(model, RunSettings(stage=0), host, most_ranks=4)
    assert [choice.changes for choice in choices[:2]] == [(("zero_optimization.stage", 3),), (("-n", 1),)]


def test_the_nearest_keep_stage_3_where_chunks_take_turns() -> None:
    cut = replace(
        BF16,
        stage=3,
        axis_sizes={"pipe": 2},
        once_an_update=True,
        accumulation_steps=4,
        schedule="breadth_first",
        chunks_per_rank=4,
        micro_batch=1,
    )
    machine = gpus("H100-80G", 2)
    assert predict(MODEL, cut, machine).fits is False
    choices = nearest(MODEL, cut, machine, most_ranks=16)
    (more,) = [choice for choice in choices if [key for key, _ in choice.changes] == ["-n"]]
    assert more.prediction.settings.stage == 3
    (fewer,) = [choice for choice in choices if "pipeline.stages" in dict(choice.changes)]
    assert "zero_optimization.stage" not in dict(fewer.changes), "3 stays 3 without a pipeline"


def test_70b_on_8_gpus_is_offloaded_and_recomputed() -> None:
    """The seeds' recipe: stage 3 alone takes 141 GB a rank as the paper counts."""
    model, machine = from_count(70 * 10**9), gpus("H100-80G", host_memory=2 << 40)
    asked = RunSettings(compute_bytes=2, stage=3, sequence=4096)
    assert predict(model, asked, machine).fits is False
    assert predict(model, asked, machine).zero_paper_bytes == 140 * 10**9
    (first, *_) = nearest(model, asked, machine, most_ranks=0)
    assert dict(first.changes) == {
        "activation_checkpointing.policy": "every_block",
        "zero_optimization.offload_optimizer.device": "cpu",
    }
    assert first.prediction.fits


def test_405b_on_128_gpus_takes_more_stages() -> None:
    """The seeds' recipe: t 8, p 4, d 4 at stage 1 takes 88.8 GB before activations as the paper counts."""
    model, machine = from_count(405 * 10**9), gpus("H100-80G", 128, host_memory=2 << 40)
    asked = RunSettings(
        compute_bytes=2,
        stage=1,
        accumulation_steps=32,
        axis_sizes={"tensor": 8, "pipe": 4},
        once_an_update=True,
        sequence_slices=True,
    )
    assert predict(model, asked, machine).zero_paper_bytes / 1e9 == pytest.approx(88.6, abs=0.05)
    choices = nearest(model, asked, machine, most_ranks=0)
    assert choices
    assert all(choice.prediction.fits for choice in choices)
    assert dict(choices[0].changes)["pipeline.stages"] == 16


def test_what_goes_back_to_its_default_beside_other_axes_is_told() -> None:
    """A partition of its own fits no other number of stages, nor sequences that do not divide other ranks."""
    machine = replace(gpus("H100-80G", 8), gpu_memory_bytes=24 * GIB)
    asked = RunSettings(
        compute_bytes=2,
        stage=1,
        sequence=2050,
        accumulation_steps=8,
        axis_sizes={"tensor": 2, "pipe": 2},
        partition="parameters",
        sequence_slices=True,
        once_an_update=True,
    )
    assert predict(MODEL, asked, machine).fits is False
    choices = nearest(MODEL, asked, machine, most_ranks=0, count=20)
    more_stages = [dict(c.changes) for c in choices if c.prediction.settings.stages > 2]
    assert more_stages
    assert all(changed["pipeline.partition"] == "cost" for changed in more_stages)
    wider = [dict(c.changes) for c in choices if c.prediction.settings.tensor_parallel > 2]
    assert wider
    assert all(changed["tensor_parallel.sequence_parallel"] is False for changed in wider)


def test_drives_are_told_with_the_folder_that_the_user_must_name() -> None:
    machine = replace(gpus("A100-80G", 1, host_memory=40 * GIB), nvme_bytes=1 << 40)
    settings = replace(BF16, stage=2, micro_batch=1)
    assert predict(MODEL, settings, machine).fits is False
    (first, *_) = nearest(MODEL, settings, machine, most_ranks=0)
    changed = dict(first.changes)
    assert changed["zero_optimization.offload_optimizer.device"] == "nvme"
    assert changed["zero_optimization.offload_optimizer.nvme_path"] == "FOLDER"
    assert "zero_optimization.offload_param.nvme_path" not in changed


def test_the_nearest_take_a_network_of_unknown_speed_for_a_slow_one() -> None:
    unknown = gpus("L40S-48G", 32)
    asked = replace(BF16, stage=0, micro_batch=1, accumulation_steps=8)
    assert predict(MODEL, asked, unknown).fits is False
    slow = replace(unknown, given=Speeds(network=CAUTIOUS["network"], ddr=CAUTIOUS["ddr"]))
    found, expected = (nearest(MODEL, asked, machine, most_ranks=0) for machine in (unknown, slow))
    assert [choice.changes for choice in found] == [choice.changes for choice in expected]
    assert all(not choice.prediction.step.complete for choice in found)


@pytest.mark.parametrize("gpu_gib", [30, 40])
def test_of_as_many_changes_another_format_comes_last(gpu_gib: int) -> None:
    """16 bits take the least time by far, and give other results than fp32."""
    machine = replace(gpus("A100-80G", 2), gpu_memory_bytes=gpu_gib * GIB)
    asked = RunSettings(stage=1, sequence=2048, micro_batch=4)
    choices = nearest(from_count(10**9), asked, machine, most_ranks=0)
    (half,) = [choice for choice in choices if choice.changes == (("bf16.enabled", True),)]
    before = choices[: choices.index(half)]
    assert before, "something else fits by itself too"
    assert all(choice.prediction.settings.compute_bytes == 4 for choice in before)
    times = [choice.prediction.step.seconds or 0.0 for choice in before]
    assert all(seconds > (half.prediction.step.seconds or 0.0) for seconds in times)
