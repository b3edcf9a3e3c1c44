"""The fastest settings that fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.estimate.model.units import from_count
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.catalogue import CAUTIOUS, find_gpu
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.changes import Choice, takes_micro_batches
from dsrun.estimate.search.fastest import fastest
from dsrun.estimate.search.layouts import divisors, layouts
from dsrun.estimate.search.what_if import what_if
from support.core_speed import core_seconds
from support.planned_machines import gpus

GIB = 1 << 30
MODEL = from_count(7 * 10**9)
BF16 = RunSettings(compute_bytes=2, sequence=2048, micro_batch=8)


def test_the_fastest_fits_and_keeps_the_samples_of_a_step() -> None:
    choice = fastest(MODEL, BF16, gpus("A100-80G"))
    assert choice is not None
    chosen = choice.prediction.settings
    assert choice.prediction.fits is not False
    assert chosen.micro_batch * chosen.accumulation_steps == 8
    assert chosen.stage in (1, 2)  # stage 3 gathers in every micro step, stage 0 does not fit


def test_the_fastest_is_as_fast_as_anything_that_fits() -> None:
    machine = gpus("A100-80G")
    choice = fastest(MODEL, BF16, machine)
    assert choice is not None
    best = choice.prediction.step.seconds
    assert best is not None
    for stage in range(4):
        for micro in divisors(8):
            other = predict(
                MODEL, replace(BF16, stage=stage, micro_batch=micro, accumulation_steps=8 // micro), machine
            )
            assert other.fits is False or (other.step.seconds or 0) >= best * 0.999


def test_there_is_no_fastest_where_nothing_fits() -> None:
    assert fastest(from_count(70 * 10**9), BF16, gpus("RTX4090-24G", 2)) is None


def _slow_network(hosts: int, gib_per_s: float) -> Machine:
    gpu = find_gpu("A100-80G")
    speeds = Speeds(network=gib_per_s * GIB)
    return Machine(label="g", ranks=hosts, ranks_per_host=1, gpu=gpu, gpu_memory_bytes=gpu.memory_bytes, given=speeds)


def test_a_pipeline_is_proposed_where_gradients_take_longer_than_what_ranks_wait() -> None:
    """Four hosts with a slow network: 13 GB of gradients cross it every update, activations are 100 times less."""
    asked = replace(BF16, micro_batch=1, accumulation_steps=16, stage=1)
    choice = fastest(MODEL, asked, _slow_network(4, 0.5))
    assert choice is not None
    chosen = choice.prediction.settings
    assert chosen.stages > 1
    assert chosen.micro_batch * chosen.accumulation_steps * (4 // chosen.stages) == 64, "samples of a step stay"
    assert chosen.stage < 3 or chosen.chunks_take_turns
    assert ("pipeline.stages", chosen.stages) in choice.changes
    assert choice.prediction.pipeline is not None
    alone = fastest(MODEL, asked, _slow_network(4, 0.5), free={"stage", "batch"})
    assert alone is None or (alone.prediction.step.seconds or 0) > (choice.prediction.step.seconds or 0)


def test_one_stage_stays_where_nothing_is_gained_by_more() -> None:
    choice = fastest(MODEL, replace(BF16, micro_batch=1, accumulation_steps=16), gpus("A100-80G"))
    assert choice is not None
    assert choice.prediction.settings.stages == 1


def test_parameters_are_cut_in_a_pipeline_only_where_chunks_take_turns() -> None:
    cut = replace(BF16, axis_sizes={"pipe": 4}, once_an_update=True, accumulation_steps=8)
    turns = replace(cut, schedule="breadth_first", chunks_per_rank=2)
    assert {p.settings.stage for p in what_if(MODEL, cut, gpus("H100-80G"))} == {0, 1, 2}
    assert {p.settings.stage for p in what_if(MODEL, turns, gpus("H100-80G"))} == {0, 1, 2, 3}
    choice = fastest(MODEL, replace(cut, stage=3), gpus("H100-80G", 4))
    assert choice is None or choice.prediction.settings.stage < 3 or choice.prediction.settings.stages == 1


@pytest.mark.depends_on_speed("searches of a few seconds")
@pytest.mark.parametrize("ranks", [128, 4096])
def test_405b_is_searched_in_seconds(ranks: int) -> None:
    asked = RunSettings(compute_bytes=2, stage=3, sequence=8192)
    found: list[Choice | None] = []

    def search() -> None:
        found.append(fastest(from_count(405 * 10**9), asked, gpus("H100-80G", ranks, host_memory=2 << 40)))

    assert core_seconds(search, tries=1) < 15
    (choice,) = found
    assert choice is not None
    assert choice.prediction.fits


def test_of_uneven_chunks_the_one_that_a_simulation_finds_fastest_is_taken() -> None:
    """126 blocks in 16 stages: by the formula, which takes chunks for even, seven a rank would be the fastest."""
    model, on = from_count(405 * 10**9), replace(gpus("H100-80G", 128), gpu_memory_bytes=160 << 30)
    asked = RunSettings(
        stage=1,
        compute_bytes=2,
        axis_sizes={"tensor": 8, "pipe": 16},
        accumulation_steps=256,
        once_an_update=True,
        recompute="blocks",
        cut_activations=True,
    )
    choice = fastest(model, asked, on, free={"schedule"})
    assert choice is not None
    each = [predict(model, one, on) for one in layouts(model, asked, on, free={"schedule"}) if takes_micro_batches(one)]
    times = [one.step.seconds or 0.0 for one in each if one.fits]
    assert choice.prediction.step.seconds == min(times)
    assert len(times) > 3


def test_a_network_of_unknown_speed_is_not_free() -> None:
    """Of cards without one in the catalogue: the choice is that of a slow one, and the time says nothing of it."""
    asked = replace(BF16, micro_batch=1, accumulation_steps=4, stage=1)
    unknown = gpus("L40S-48G", 32)
    assert unknown.speeds(half=True).network is None
    found = fastest(MODEL, asked, unknown)
    slow = fastest(MODEL, asked, replace(unknown, given=Speeds(network=CAUTIOUS["network"], ddr=CAUTIOUS["ddr"])))
    free = fastest(MODEL, asked, replace(unknown, given=Speeds(network=1e18)))
    assert found is not None
    assert slow is not None
    assert free is not None
    assert found.prediction.settings == slow.prediction.settings
    assert found.changes == slow.changes
    assert found.prediction.traffic.network_bytes < free.prediction.traffic.network_bytes
    assert found.prediction.unknown_speeds == ("network",)
    assert not found.prediction.step.complete
    assert found.prediction == predict(MODEL, found.prediction.settings, unknown)


def test_ranks_that_wait_count_where_no_speed_is_known() -> None:
    """A pipeline of four ranks sends less than four replicas do; with one micro batch three of them wait."""
    processors = Machine(label="cpu", ranks=4, ranks_per_host=4, host_memory_bytes=64 * GIB, cores_per_host=4)
    found = fastest(from_count(350 * 10**6), RunSettings(stage=1, sequence=512), processors)
    assert found is not None
    assert found.prediction.settings.stages == 1
    assert found.prediction.step.seconds is None
    assert "flops" in found.prediction.unknown_speeds
