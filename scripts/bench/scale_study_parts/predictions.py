"""What `dsrun.estimate` predicts for the published layouts, and for 4,096 GPUs, at one rate that one row gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from dsrun.estimate.model.stages import cut_into_stages
from dsrun.estimate.model.units import from_count
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.pipeline import schedule_of
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.formulas import bubble_ratio
from dsrun.pipeline_schedules.simulate import Costs, simulate
from dsrun.pipeline_schedules.zero_actions import with_zero

from .published import (
    LLAMA3,
    LLAMA3_PIPE,
    LLAMA3_TENSOR,
    TITAN_PIPE,
    TITAN_RANKS,
    TITAN_TENSOR,
    Llama3Row,
    TitanRow,
    titan_bounds,
)

MODEL = from_count(405 * 10**9)
RANKS_PER_HOST = 8
#: 126 blocks, the embedding and the head are 128 layers: 16 stages of 8 chunks.
LLAMA3_CHUNKS = 8
#: Samples of 8,192 tokens in an update of 16.8M.
SAMPLES = 2048
PAPER_RANKS = 4096
_STEPS = 60


def machine_of(gpu: str, ranks: int, flops: float) -> Machine:
    """Returns hosts of 8 GPUs with links of the catalogue, whose kernels reach so many FLOP/s."""
    found = find_gpu(gpu)
    return Machine(
        label=gpu,
        ranks=ranks,
        ranks_per_host=RANKS_PER_HOST,
        gpu=found,
        gpu_memory_bytes=found.memory_bytes,
        given=Speeds(flops=flops),
    )


def llama3_settings(micros: int, *, sequence: int = 8192, context: int = 1) -> RunSettings:
    """Returns the layout of the table's rows: tensor 8 with slices of the sequence, pipe 16, nothing recomputed."""
    return RunSettings(
        stage=1,
        compute_bytes=2,
        axis_sizes={"pipe": LLAMA3_PIPE, "tensor": LLAMA3_TENSOR, "ring": context},
        schedule="interleaved",
        chunks_per_rank=LLAMA3_CHUNKS,
        once_an_update=True,
        sequence_slices=True,
        accumulation_steps=micros,
        sequence=sequence,
    )


def llama3(row: Llama3Row, flops: float) -> Prediction:
    """Returns the prediction of a row; a micro batch is one sample."""
    settings = llama3_settings(row.samples, sequence=row.sequence, context=row.context)
    return predict(MODEL, settings, machine_of("H100-80G", row.ranks, flops))


def tflops(prediction: Prediction) -> float:
    """Returns the model's TFLOP/s of a GPU."""
    assert prediction.flops_per_second is not None
    return prediction.flops_per_second / 1e12


@cache
def fitted_flops() -> float:
    """Returns the FLOP/s at which kernels run if the first row of Llama 3 is as published."""
    low, high = 1e14, 1e15
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if tflops(llama3(LLAMA3[0], middle)) < LLAMA3[0].tflops else (low, middle)
    return (low + high) / 2


def titan(row: TitanRow, *, micros: int, chunks: int, flops: float) -> float:
    """Returns tokens per second of a GPU for a row of torchtitan.

    Args:
        row: the row.
        micros: micro batches that the samples of a data rank are cut into.
        chunks: chunks of a pipeline rank.
        flops: FLOP/s of a GPU's kernels.
    """
    assert MODEL.architecture is not None
    settings = RunSettings(
        stage=2,
        compute_bytes=2,
        axis_sizes={"pipe": TITAN_PIPE, "tensor": TITAN_TENSOR, "ring": row.context},
        schedule="interleaved" if row.schedule == "interleaved" else "1f1b",
        chunks_per_rank=chunks,
        partition=titan_bounds(MODEL.architecture.layers, TITAN_PIPE * chunks),
        once_an_update=True,
        sequence_slices=True,
        tensor_overlaps=True,
        recompute="blocks",
        accumulation_steps=micros,
        micro_batch=row.samples // micros,
        sequence=row.sequence,
    )
    found = predict(MODEL, settings, machine_of("H100-80G", TITAN_RANKS, flops))
    assert found.step.seconds is not None
    return found.tokens_per_step / TITAN_RANKS / found.step.seconds


def titan_flops(row: TitanRow, *, micros: int, chunks: int) -> float:
    """Returns the FLOP/s at which a row of torchtitan is as published, see `titan`."""
    low, high = 1e13, 2e15
    for _ in range(_STEPS):
        middle = (low + high) / 2
        slow = titan(row, micros=micros, chunks=chunks, flops=middle) < row.tokens
        low, high = (middle, high) if slow else (low, middle)
    return (low + high) / 2


def of_ranks(ranks: int, *, sequence: int = 8192, context: int = 1, gpu: str = "H100-80G") -> Prediction:
    """Returns the prediction for so many GPUs, always with 16.8M tokens in an update."""
    data = ranks // (LLAMA3_TENSOR * LLAMA3_PIPE * context)
    micros = SAMPLES * 8192 // sequence // data
    settings = llama3_settings(micros, sequence=sequence, context=context)
    return predict(MODEL, settings, machine_of(gpu, ranks, fitted_flops()))


@dataclass(frozen=True, slots=True)
class Steps:
    """A step by the formula and by the list of actions, in seconds; all else but computing and layers is left out.

    Attributes:
        formula: seconds by the closed form of the bubble, of the costliest stage.
        simulated: seconds by the actions of all ranks.
        with_messages: simulated seconds, each message between stages taking its time.
    """

    formula: float
    simulated: float
    with_messages: float


def steps(prediction: Prediction) -> Steps:
    """Returns a step by the closed form, and by the simulated actions of dsrun's own schedule."""
    settings, pipeline = prediction.settings, prediction.pipeline
    assert pipeline is not None
    paths = {path.path: path.seconds or 0.0 for path in prediction.paths}
    busy = (paths["compute"] + paths["tensor"]) / pipeline.stretch
    ratio = bubble_ratio(
        settings.schedule, ranks=settings.stages, micros=settings.accumulation_steps, virtual=settings.chunks_per_rank
    )
    schedule = with_zero(with_communication(schedule_of(settings)), parameters="never")
    stages = cut_into_stages(prediction.model, settings)
    costs = [0.0] * schedule.chunks
    for rank, stage in enumerate(stages):
        for chunk, cost in zip(schedule.chunks_of(rank), stage.costs, strict=True):
            costs[chunk] = cost
    # A forward, gradients of inputs and gradients of weights take as long as each other.
    unit = busy / (3 * settings.accumulation_steps * max(stage.cost for stage in stages))
    parts = [cost * unit for cost in costs]
    priced = Costs(forward=parts, input_grads=parts, weight_grads=parts)
    shape = prediction.model.architecture
    assert shape is not None
    message = settings.tokens_per_micro_step * shape.hidden * settings.compute_bytes
    network = prediction.machine.speeds(half=True).network
    assert network is not None
    link = message * prediction.machine.ranks_per_host / network
    return Steps(
        formula=busy * (1 + ratio),
        simulated=simulate(schedule, priced).seconds,
        with_messages=simulate(schedule, replace(priced, link=link)).seconds,
    )
