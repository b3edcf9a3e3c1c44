"""What the search leaves unpriced is slower, or does not fit: held to all settings of a small machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.units import from_architecture
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.bounds import least_bytes, least_compute_seconds, least_stretch
from dsrun.estimate.search.changes import RECOMPUTATIONS, Recomputation, with_recomputation
from dsrun.estimate.search.fastest import fastest
from dsrun.pipeline_schedules.generate import ScheduleName

GIB = 1 << 30
HOST_GIB = 64
#: Sizes of a GPU's memory: from one that takes none of these settings to one that takes all.
SIZES = (2.4, 3, 4, 6, 9, 20)
#: Samples of an update, and how much faster an offloaded step has to be.
SAMPLES, MARGIN = 8, 1.1
SHAPE = Architecture(layers=12, hidden=2048, intermediate=5632, heads=32, kv_heads=4, head_dim=64, vocab=32000)
MODEL = from_architecture(SHAPE, label="twelve blocks")
ASKED = RunSettings(compute_bytes=2, sequence=2048, micro_batch=2)


def two_hosts(gpu_gib: float) -> Machine:
    gpu = find_gpu("A100-80G")
    limits = {"gpu_memory_bytes": int(gpu_gib * GIB), "host_memory_bytes": HOST_GIB * GIB}
    return Machine(label="g", ranks=4, ranks_per_host=2, gpu=gpu, **limits)


def every_layout() -> Iterator[RunSettings]:
    """Yields each layout of four ranks that shares no layer between hosts, without a word of the search's own."""
    for tensor, pipe in product((1, 2), (1, 2, 4)):
        if tensor * pipe > 4:
            continue
        schedules: list[tuple[ScheduleName, int]] = [("1f1b", 1)]
        if pipe > 1:
            chunks = [chunks for chunks in (2, 3, 6) if 12 // pipe % chunks == 0]
            schedules += [("zero_bubble", 1), ("zbv", 2)]
            schedules += [(name, n) for name in ("interleaved", "breadth_first") for n in chunks]
        for (schedule, virtual), micro in product(schedules, (1, 2, 4, 8)):
            steps = SAMPLES * tensor * pipe // 4 // micro
            if steps >= 1 and (schedule != "interleaved" or steps % pipe == 0):
                yield replace(
                    ASKED,
                    axis_sizes={"tensor": tensor, "pipe": pipe},
                    sequence_slices=tensor > 1,
                    once_an_update=pipe > 1,
                    schedule=schedule,
                    chunks_per_rank=virtual,
                    micro_batch=micro,
                    accumulation_steps=steps,
                )


@pytest.fixture(scope="module")
def priced() -> list[Prediction]:
    """Returns a prediction of all settings that there are."""
    found: list[Prediction] = []
    for layout in every_layout():
        has_slices = layout.stages == 1 or layout.chunks_take_turns
        for stage, policy in product(range(4 if has_slices else 3), RECOMPUTATIONS):
            recompute = "none" if policy == "none" else "blocks"
            cut = replace(
                layout, stage=stage, recompute=recompute, policy="every_block" if policy == "none" else policy
            )
            for optimizer, param in (("none", "none"), ("cpu", "none"), ("cpu", "cpu")):
                if (stage or optimizer == "none") and (stage == 3 or param == "none"):
                    changed = replace(cut, offload_optimizer=optimizer, offload_param=param)
                    found.append(predict(MODEL, changed, two_hosts(500), exact=False))
    return found


def cost(prediction: Prediction) -> float:
    assert prediction.step.seconds is not None
    return prediction.step.seconds * (1.0 if prediction.settings.offload_optimizer == "none" else MARGIN)


@pytest.mark.parametrize("gpu_gib", SIZES)
def test_nothing_faster_fits_than_what_the_search_finds(gpu_gib: float, priced: list[Prediction]) -> None:
    fitting = [one for one in priced if one.tiers[0].total_bytes <= gpu_gib * GIB and one.host_bytes <= HOST_GIB * GIB]
    choice = fastest(MODEL, ASKED, two_hosts(gpu_gib))
    assert choice is not None
    chosen = choice.prediction.settings
    if not fitting:
        assert chosen.tensor_parallel == 4, "a layer's ranks are on both hosts only where nothing else fits"
        return
    again = predict(MODEL, chosen, two_hosts(gpu_gib), exact=False)
    assert again.fits
    # Floors that round to the same three digits are equal.
    assert cost(again) <= min(cost(one) for one in fitting) * 1.006
    assert chosen.micro_batch * chosen.accumulation_steps * 4 // (chosen.stages * chosen.tensor_parallel) == SAMPLES


def test_the_sizes_of_memory_take_from_none_of_the_settings_to_all(priced: list[Prediction]) -> None:
    fitting = [sum(one.tiers[0].total_bytes <= size * GIB for one in priced) for size in SIZES]
    assert fitting[0] == 0
    assert fitting[-1] == len(priced)
    assert sorted(set(fitting)) == fitting, "each size has more than the one before"


def test_no_settings_are_below_the_bounds(priced: list[Prediction]) -> None:
    for one in priced:
        settings, machine = one.settings, one.machine
        assert one.step.seconds is not None
        # Of seconds, the bound is that of nothing recomputed, of which these take as long or longer.
        waits = 1.0 if settings.schedule == "zbv" and settings.recompute == "blocks" else least_stretch(settings)
        bound = least_compute_seconds(MODEL, settings, machine) * waits
        assert one.step.seconds >= bound * (1 - 1e-9)
        assert one.tiers[0].total_bytes >= least_bytes(MODEL, settings, machine) * (1 - 1e-9)


def test_a_larger_micro_batch_is_tried_where_it_leaves_nothing_to_sum_up() -> None:
    """With the optimizer in host memory, sums over several micro batches lie on the GPU, those of one nowhere.

    Short samples: the activations of four take less than these sums.
    """
    asked = replace(
        ASKED,
        sequence=16,
        stage=1,
        offload_optimizer="cpu",
        axis_sizes={"pipe": 2},
        once_an_update=True,
        micro_batch=1,
        accumulation_steps=4,
    )
    summed = predict(MODEL, asked, replace(two_hosts(80), ranks=2, ranks_per_host=2), exact=False)
    at_once = predict(MODEL, replace(asked, micro_batch=4, accumulation_steps=1), summed.machine, exact=False)
    needed = at_once.tiers[0].total_bytes
    assert needed < summed.tiers[0].total_bytes
    choice = fastest(MODEL, asked, replace(summed.machine, gpu_memory_bytes=needed), free={"batch"})
    assert choice is not None
    assert choice.prediction.settings.micro_batch == 4


@pytest.mark.parametrize("policy", RECOMPUTATIONS)
def test_a_pipeline_needs_the_memory_that_its_formula_tells(policy: Recomputation) -> None:
    """What fits by the formula, which the search asks first, fits as the schedule is simulated too.

    Of four chunks the inner two have the most blocks, as many each, and hold different numbers of micro batches.
    """
    for layout in every_layout():
        bounds = (0, 1, 6, 11, 12) if layout.stages * layout.chunks_per_rank == 4 else "cost"
        cut = replace(layout, stage=1, offload_optimizer="cpu", partition=bounds)
        settings = with_recomputation(cut, policy)
        quick, exact = (predict(MODEL, settings, two_hosts(500), exact=is_exact) for is_exact in (False, True))
        assert [tier.total_bytes for tier in quick.tiers] == [tier.total_bytes for tier in exact.tiers]
        assert quick.host_bytes == exact.host_bytes
