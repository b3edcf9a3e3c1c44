"""Which other settings fit, and which of them is fastest."""

from __future__ import annotations

from dataclasses import replace

from dsrun.config.findings import Code
from dsrun.config.load import inspect
from dsrun.estimate.model.units import from_count
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search import divisors, fastest, nearest, what_if

GIB = 1 << 30
MODEL = from_count(7 * 10**9)
BF16 = RunSettings(compute_bytes=2, sequence=2048, micro_batch=8)


def gpus(name: str, count: int = 8) -> Machine:
    gpu = find_gpu(name)
    return Machine(label=name, ranks=count, ranks_per_host=count, gpu=gpu, gpu_memory_bytes=gpu.memory_bytes)


def test_what_if_covers_every_stage_and_offload_and_marks_what_cannot_run() -> None:
    found = what_if(MODEL, BF16, gpus("H100-80G"))
    keys = [(p.settings.stage, p.settings.offload_optimizer, p.settings.offload_param) for p in found]
    assert len(keys) == len(set(keys)) == 12
    for prediction in found:
        given = prediction.settings
        offload = {"offload_optimizer": given.offload_optimizer, "offload_param": given.offload_param}
        section = {"stage": given.stage, **{key: {"device": tier} for key, tier in offload.items()}}
        codes = {finding.code for finding in inspect({"zero_optimization": section}).findings}
        assert given.can_run == (Code.PLANNED not in codes), f"{section}: as the config says"


def test_each_stage_needs_less_than_the_one_before() -> None:
    found = [p for p in what_if(MODEL, BF16, gpus("H100-80G")) if p.settings.offload_optimizer == "none"]
    totals = [p.tier("GPU").total_bytes for p in found]
    assert totals == sorted(totals, reverse=True)


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
    (first, *_) = nearest(MODEL, cut, machine, most_ranks=16)
    assert [key for key, _ in first.changes] == ["-n"]
    assert first.prediction.settings.stage == 3


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
    alone = fastest(MODEL, asked, _slow_network(4, 0.5), pipelines=False)
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
