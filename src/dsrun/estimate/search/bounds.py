"""What no settings of a layout can be below, without pricing them: seconds of a step, bytes of a rank."""

from __future__ import annotations

from dataclasses import replace

from dsrun.estimate.model.activations import (
    block_bytes_per_token,
    kept_result_bytes_per_token,
    product_bytes_per_token,
    stored_input_bytes,
)
from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.changes import recomputation_of, with_recomputation
from dsrun.estimate.time.steps import model_flops
from dsrun.pipeline_schedules.formulas import bubble_ratio

_FP32_BYTES = 4


def least_compute_seconds(model: ModelSize, settings: RunSettings, machine: Machine) -> float:
    """Returns how long a rank computes at least with nothing recomputed; the same in every layout of the same samples.

    The costliest pipeline stage has at least the mean of all. 0 where the speed is not known.

    Args:
        model: the model.
        settings: settings of any layout.
        machine: machine to train on.
    """
    flops = machine.speeds(half=settings.compute_bytes == 2).flops
    if flops is None:
        return 0.0
    return model_flops(model, with_recomputation(settings, "none"), again=0.0) / settings.stages / flops


def least_stretch(settings: RunSettings) -> float:
    """Returns by how much ranks that wait stretch a step at least, with nothing recomputed."""
    stages, micros = settings.stages, settings.accumulation_steps
    if stages == 1 or (settings.schedule == "zero_bubble" and micros < stages):  # of which there is no formula
        return 1.0
    return 1.0 + bubble_ratio(settings.schedule, ranks=stages, micros=micros, virtual=settings.chunks_per_rank)


def least_bytes(model: ModelSize, settings: RunSettings, machine: Machine) -> float:
    """Returns the bytes that the rank with the most holds at least where it computes.

    Its part of the trained parameters is at least that of all stages' mean; it holds all of its blocks' activations of
    one micro batch, and of every one where a chunk is through with all before the next begins.

    Args:
        model: the model.
        settings: settings of the run.
        machine: machine to train on.
    """
    tensor, stages, stage = settings.tensor_parallel, settings.stages, settings.stage
    numel = model.trained_numel / (tensor * stages)
    shard = numel / settings.ranks_of("shard", machine.ranks)
    held = 0.0
    if stage < 3 or settings.offload_param == "none":
        held += settings.compute_bytes * (shard if stage == 3 else numel)
    if stage < 2:
        held += settings.compute_bytes * numel
    if settings.offload_optimizer == "none":
        held += _optimizer_bytes(settings) * (numel if stage == 0 else shard)
    return held + _least_activations(model, settings)


def _optimizer_bytes(settings: RunSettings) -> float:
    """Returns the bytes of sums, masters and states of an element."""
    master = settings.master_bytes if settings.has_master else 0
    states = (settings.state_bytes or settings.master_bytes) * settings.states_per_element
    return (settings.sum_bytes or settings.master_bytes) + master + states


def _least_activations(model: ModelSize, settings: RunSettings) -> float:
    shape = model.architecture
    if shape is None:
        return 0.0
    tokens = settings.tokens_per_micro_step
    match recomputation_of(settings):
        case "none":
            block = float(block_bytes_per_token(shape, settings) * tokens)
        case "selective":
            results = kept_result_bytes_per_token(shape, settings, keeps_products=True)
            block = float((product_bytes_per_token(shape, settings) + results) * tokens)
        case "every_block" if not settings.activations_on_cpu and settings.kept_segments is None:
            results = kept_result_bytes_per_token(shape, settings, keeps_products=False) * tokens
            block = float(stored_input_bytes(shape, replace(settings, recompute="blocks")) + results)
        case _:
            return 0.0
    live = settings.accumulation_steps if settings.stages > 1 and settings.schedule == "breadth_first" else 1
    return live * block * shape.layers / settings.stages
