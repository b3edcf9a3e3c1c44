"""Ranks that share cores: what they wait for each other, and what they copy, as the plan counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.units import from_architecture
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings

SHAPE = Architecture(layers=4, hidden=64, intermediate=128, heads=4, kv_heads=4, head_dim=16, vocab=64)
SPEEDS = Speeds(flops=1e9, memory=1e9, peer=1e8, network=1e6)
PIPE = RunSettings(axis_sizes={"pipe": 4}, sequence=32, once_an_update=True)
DATA = RunSettings(stage=1, sequence=32)


def plan(settings: RunSettings, cores: float | None, *, ranks: int = 4, per_host: int = 4) -> Prediction:
    machine = Machine(label="test", ranks=ranks, ranks_per_host=per_host, cores_per_host=cores, given=SPEEDS)
    return predict(from_architecture(SHAPE, label="test"), settings, machine)


def seconds_of(prediction: Prediction) -> dict[str, float]:
    return {path.path: path.seconds for path in prediction.paths if path.seconds is not None}


def whole_flops(settings: RunSettings) -> float:
    """Returns the FLOPs of an update of all ranks."""
    return plan(replace(settings, axis_sizes={}), None, ranks=1, per_host=1).traffic.flops


@pytest.mark.parametrize("micros", [4, 16])
def test_a_bubble_costs_nothing_while_as_many_ranks_compute_as_there_are_cores(micros: int) -> None:
    settings = replace(PIPE, accumulation_steps=micros)
    found = plan(settings, 2)
    assert found.pipeline is not None
    assert found.pipeline.bubble > 0.1
    assert seconds_of(found)["compute"] == pytest.approx(whole_flops(settings) / 1e9 / 2, rel=1e-6)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, None])
def test_stages_that_compute_one_after_the_other_have_a_core_each(cores: int | None) -> None:
    assert seconds_of(plan(PIPE, cores))["compute"] == pytest.approx(whole_flops(PIPE) / 1e9, rel=1e-6)


def test_the_cores_do_the_work_of_all_stages_and_not_the_busiest_s_as_often_as_there_are_ranks() -> None:
    settings = replace(PIPE, accumulation_steps=16, partition=(0, 2, 3, 4), axis_sizes={"pipe": 3})
    found = plan(settings, 1, ranks=3, per_host=3)
    assert found.pipeline is not None
    assert found.pipeline.imbalance > 0.3
    assert seconds_of(found)["compute"] == pytest.approx(whole_flops(settings) / 1e9, rel=1e-6)


def test_ranks_copy_and_update_with_the_cores_they_compute_on() -> None:
    own, shared = plan(DATA, None), plan(DATA, 2)
    apart, together = seconds_of(own), seconds_of(shared)
    assert together == pytest.approx({path: 2 * seconds for path, seconds in apart.items()})
    assert own.step.seconds == max(apart["compute"] + apart["optimizer"], apart["data"])
    assert shared.step.seconds == pytest.approx(sum(together.values()))
    assert shared.step.bottleneck == max(together, key=lambda path: together[path])


@pytest.mark.parametrize("cores", [4, 8])
def test_with_a_core_each_ranks_are_as_fast_as_alone_but_copy_when_they_do_not_compute(cores: int) -> None:
    own, each = plan(DATA, None), plan(DATA, cores)
    assert seconds_of(each) == seconds_of(own)
    assert each.step.seconds == pytest.approx(sum(seconds_of(own).values()))


def test_ranks_that_share_layers_sum_as_often_as_they_compute() -> None:
    settings = RunSettings(axis_sizes={"tensor": 4}, sequence=32)
    own, shared = seconds_of(plan(settings, None)), seconds_of(plan(settings, 2))
    assert (shared["compute"], shared["tensor"]) == pytest.approx((2 * own["compute"], 2 * own["tensor"]))


def test_what_goes_to_other_hosts_is_sent_by_their_network_and_not_by_the_cores() -> None:
    own, shared = plan(DATA, None, ranks=8), plan(DATA, 2, ranks=8)
    assert seconds_of(shared)["data"] == seconds_of(own)["data"]
    assert shared.step.seconds == seconds_of(own)["data"], "beside what the cores do"
