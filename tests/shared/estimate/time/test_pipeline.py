"""A pipeline's plan, held to values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsrun.config.load import load
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.stages import cut_into_stages, head_in_blocks
from dsrun.estimate.model.units import from_architecture
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings, read_settings
from dsrun.estimate.time.collectives import collective_bytes
from dsrun.estimate.time.pipeline import PipelineEstimate, pipeline_estimate, schedule_of

#: A block has 262,400 parameters; on two ranks a slice of it is 131,328 elements, of 256 each.
SHAPE = Architecture(layers=8, hidden=128, intermediate=512, heads=4, kv_heads=4, head_dim=32, vocab=1)
MODEL = from_architecture(SHAPE, label="m")
PADDED = 2 * 131_328
BASE = RunSettings(
    stage=1,
    compute_bytes=2,
    sequence=64,
    micro_batch=1,
    accumulation_steps=8,
    axis_sizes={"pipe": 4},
    once_an_update=True,
)
#: What crosses a boundary: 64 tokens of 128 values in 2 bytes.
BOUNDARY = 64 * 128 * 2


def estimate(**changes: object) -> PipelineEstimate:
    settings = replace(BASE, **changes)
    found = pipeline_estimate(cut_into_stages(MODEL, settings), settings)
    assert found is not None
    return found


def plan(settings: RunSettings = BASE, ranks: int = 8, ranks_per_host: int = 8) -> Prediction:
    gpu = find_gpu("A100-80G")
    machine = Machine(label="g", ranks=ranks, ranks_per_host=ranks_per_host, gpu=gpu, gpu_memory_bytes=gpu.memory_bytes)
    return predict(MODEL, settings, machine)


def test_one_stage_has_no_pipeline() -> None:
    assert plan(replace(BASE, axis_sizes={}, once_an_update=False)).pipeline is None


def test_1f1b_holds_one_micro_batch_less_on_each_stage() -> None:
    assert [stage.live for stage in estimate().stages] == [4, 3, 2, 1]
    assert [stage.live for stage in estimate(accumulation_steps=2).stages] == [2, 2, 2, 1]
    assert [stage.live for stage in estimate(schedule="gpipe").stages] == [8, 8, 8, 8]
    assert [stage.live for stage in estimate(accumulation_steps=512).stages] == [4, 3, 2, 1]


def test_interleaved_holds_more_of_smaller_chunks() -> None:
    """p(1 + (p-1)/(pv)) whole stages on the first rank: 4 x (1 + 3/8) = 5.5."""
    assert estimate(schedule="interleaved", chunks_per_rank=2).stages[0].live == 5.5


def test_stages_recompute_what_does_not_fit_a_memory_budget() -> None:
    """Two blocks a stage, of which 4, 3, 2 and 1 micro batches are held; the budget is four blocks and four inputs."""
    block, block_input = 64 * (4 * 128 + 4 * 128 + 4 * 512) * 2, 64 * 128 * 2
    budget: dict[str, Any] = {
        "recompute": "blocks",
        "policy": "memory_budget",
        "memory_budget": 4 * block + 4 * block_input,
    }
    found = estimate(**budget)
    assert [stage.again for stage in found.stages] == [0.5, 0.5, 0, 0]
    every = estimate(recompute="blocks")
    assert [stage.again for stage in every.stages] == [1, 1, 1, 1]
    assert found.bubble > every.bubble, "late stages wait for early ones"
    assert found.stretch < every.stretch, "and take less time themselves before the first one has its gradients"
    kept, none = plan(replace(BASE, **budget)), plan()
    lines = {line.name: line.size_bytes for line in kept.tiers[0].lines}
    assert (kept.fullest, lines["activations"]) == (0, budget["memory_budget"])
    assert kept.traffic.flops / none.traffic.flops == pytest.approx(3.5 / 3, rel=1e-3)
    # Six blocks and two inputs: of a model on one stage a quarter would be computed again, of the first stage half is.
    larger = plan(replace(BASE, **{**budget, "memory_budget": 6 * block + 2 * block_input}))
    assert larger.traffic.flops / none.traffic.flops == pytest.approx(3.5 / 3, rel=1e-3)


def test_no_stage_recomputes_the_output_layer() -> None:
    """Forwards are 4 blocks, and 4 and the head; a backward is two forwards, and one more of the blocks."""
    shape = replace(SHAPE, vocab=10_000)
    head = head_in_blocks(shape, 64)
    settings = replace(
        BASE,
        axis_sizes={"pipe": 2},
        partition="uniform",
        schedule="gpipe",
        accumulation_steps=1,
        recompute="blocks",
    )
    stages = cut_into_stages(from_architecture(shape, label="m"), settings)
    first, last = 4 * (1 + 3), 4 * (1 + 3) + 3 * head
    simulated = pipeline_estimate(stages, settings)
    assert simulated is not None
    assert simulated.stretch == pytest.approx((first + last) / last), "of one micro batch, one after the other"
    assert simulated.imbalance == pytest.approx(2 * last / (first + last) - 1)
    by_formula = pipeline_estimate(stages, settings, exact=False)
    assert by_formula is not None
    assert by_formula.imbalance == simulated.imbalance


def test_bytes_between_stages() -> None:
    """An inner rank sends 2M tensors, an end M; with two chunks in turns an inner one 4M, an end 3M."""
    assert [stage.sent_bytes for stage in estimate().stages] == [
        8 * BOUNDARY,
        16 * BOUNDARY,
        16 * BOUNDARY,
        8 * BOUNDARY,
    ]
    turns = estimate(schedule="interleaved", chunks_per_rank=2)
    assert [stage.sent_bytes for stage in turns.stages] == [n * 8 * BOUNDARY for n in (3, 4, 4, 3)]
    assert turns.sent_bytes == 2 * 2 * 8 * BOUNDARY
    assert estimate(boundary_bytes=4).sent_bytes == 16 * 2 * BOUNDARY


def test_equal_stages_wait_as_the_formula_says() -> None:
    """3 / (8 + 3) = 27.3 %, and with two chunks a rank 3 / (16 + 3) = 15.8 %; a head of one row is as good as none."""
    for changes, share in (({}, 3 / 11), ({"schedule": "interleaved", "chunks_per_rank": 2}, 3 / 19)):
        found = estimate(**changes)
        assert found.bubble_formula == pytest.approx(share, abs=1e-12)
        assert found.bubble == pytest.approx(share, abs=1e-3)
    assert estimate().stretch == pytest.approx(11 / 8, abs=2e-3)


def test_the_efficiency_with_half_as_many_chunks_as_stages() -> None:
    """8 x 4 / (8 x 4 + 2 x 3) = 84.2 %: what interleaved 1F1B with two chunks reaches on four stages."""
    assert estimate().efficiency_interleaved == 32 / 38
    assert 1 - estimate(schedule="interleaved", chunks_per_rank=2).bubble_formula == pytest.approx(32 / 38)
    assert estimate(accumulation_steps=6).efficiency_interleaved is None
    assert estimate(axis_sizes={"pipe": 1 + 2}, accumulation_steps=9).efficiency_interleaved is None


def test_a_stage_holds_its_blocks_and_two_data_ranks_share_its_states() -> None:
    """Two blocks: 2 + 2 bytes of parameters and gradients, 4 of sums, all whole; 4 + 4 + 8 of states, halved."""
    predicted = plan()
    assert predicted.pipeline is not None
    assert predicted.fullest == 0, "the first stage holds four micro batches, and the embedding"
    lines = {line.name: line.size_bytes for line in predicted.tiers[0].lines}
    embedding = 2 * 256  # one row of 128, in two slices
    whole = 2 * PADDED + embedding
    assert lines["parameters"] == lines["gradients"] == 2 * whole
    assert lines["whole gradient sums fp32"] == 4 * whole
    assert lines["gradient sums fp32"] == lines["master weights"] == 4 * whole // 2
    assert lines["optimizer states"] == 8 * whole // 2
    # Of a block and token: (4 x 128 + 2 x 128 + 2 x 128 + 4 x 512) x 2 bytes; two blocks, four micro batches.
    assert lines["activations"] == 4 * 2 * 64 * (4 * 128 + 4 * 128 + 4 * 512) * 2


def test_a_host_holds_what_the_stages_on_it_need() -> None:
    """Two micro batches of three blocks are more than one of five, whose masters and moments are more on the host."""
    settings = replace(BASE, axis_sizes={"pipe": 2}, partition=(0, 3, 8), sequence=4096, offload_optimizer="cpu")
    found = plan(settings)
    assert found.fullest == 0
    of_fullest = sum(tier.total_bytes for tier in found.tiers if tier.name.startswith("CPU"))
    # Four data ranks; a slice of a block is 65,792 elements, with a master and two moments in fp32.
    more = 2 * 65_792 * 12
    assert 8 * of_fullest < found.host_bytes < 8 * (of_fullest + more)
    assert found.host_bytes == pytest.approx(4 * of_fullest + 4 * (of_fullest + more), rel=1e-3)
    apart = plan(settings, ranks_per_host=4)
    assert apart.host_bytes == pytest.approx(4 * (of_fullest + more), rel=1e-3)


def test_with_one_data_rank_nothing_is_summed_apart() -> None:
    lines = {line.name for line in plan(ranks=4).tiers[0].lines}
    assert "whole gradient sums fp32" not in lines


def test_gradients_are_reduced_once_in_fp32() -> None:
    from dsrun.estimate.memory.model_state import pad_units

    units = pad_units(MODEL.units, 2)
    elements = sum(unit.padded for unit in units)
    once, each = collective_bytes(units, BASE), collective_bytes(units, replace(BASE, once_an_update=False))
    assert (once.reduce_scatter, each.reduce_scatter) == (4 * elements, 8 * 2 * elements)


def test_computing_takes_as_much_longer_as_ranks_wait() -> None:
    predicted = plan()
    assert predicted.pipeline is not None
    seconds = next(floor.seconds for floor in predicted.paths if floor.path == "compute")
    speed = predicted.machine.speeds(half=True).flops
    assert speed is not None
    assert seconds == pytest.approx(predicted.traffic.flops / speed * predicted.pipeline.stretch)
    alone = plan(replace(BASE, axis_sizes={}, once_an_update=False))
    assert predicted.traffic.flops == pytest.approx(alone.traffic.flops / 4, rel=1e-3)
    assert predicted.tokens_per_step == 8 * 64 * 2


def test_a_config_is_read_with_its_pipeline() -> None:
    config = load(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 8,
            "pipeline": {
                "stages": 2,
                "virtual_stages": 2,
                "boundary_dtype": "bf16",
                "activation_checkpoint_interval": 2,
                "partition": [0, 1, 2, 3, 8],
            },
        }
    )
    settings = read_settings(config, ranks=8, sequence=64)
    assert (settings.stages, settings.schedule, settings.chunks_per_rank) == (2, "interleaved", 2)
    assert (settings.partition, settings.boundary_bytes, settings.once_an_update) == ((0, 1, 2, 3, 8), 2, True)
    assert (settings.recompute, settings.policy, settings.interval) == ("blocks", "interval", 2)
    assert settings.ranks_of("batch", 8) == settings.ranks_of("shard", 8) == 4
    schedule = schedule_of(settings)
    assert (schedule.ranks, schedule.chunks, schedule.micros) == (2, 4, 8)


@pytest.mark.parametrize("name", ["gpipe", "breadth_first", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_ten_million_micro_batches_are_planned_as_a_few(name: str) -> None:
    """In seconds: a schedule of as many actions would not end in a test's time."""
    virtual = 2 if name in ("interleaved", "breadth_first", "zbv") else 1
    micros = 10_000_000
    found = estimate(schedule=name, chunks_per_rank=virtual, accumulation_steps=micros)
    few = estimate(schedule=name, chunks_per_rank=virtual, accumulation_steps=40)
    assert found.bubble_formula is not None
    # Of blocks that are all alike the last stage's has the head too, whose one column costs next to nothing.
    assert found.imbalance == pytest.approx(few.imbalance, rel=1e-9)
    assert 0 <= found.stretch - 1 <= 8 / micros
    holds_all = name in ("gpipe", "breadth_first")
    assert [stage.live for stage in found.stages] == [micros if holds_all else stage.live for stage in few.stages]
    assert found.sent_bytes == few.sent_bytes * micros // 40
