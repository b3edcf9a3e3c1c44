"""Schema of `checkpoint`, `datastates_ckpt` and their writers: how a run is saved."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from dsrun.config.knob import Section, Status, knob, unset
from dsrun.config.values import Flag, Positive

_SAFETENSORS = "tensors are always written as plain safetensors"


def _capitalised(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


class ParallelWrite(Section):
    """Who writes what."""

    default_status = Status.PLANNED
    default_why = "train with pipeline stages"

    pipeline_stage: Annotated[Flag, knob("Every data-parallel rank writes a part of its pipeline stage.")] = False


class Writer(Section):
    """Buffers of the writer."""

    default_status = Status.NO_MEANING
    default_why = _SAFETENSORS

    type: Annotated[Literal["mock", "python", "fast"], knob("Writer by name.")] = "fast"
    io_buffer_size: Annotated[Positive, knob("Size of a write buffer.", unit="bytes")] = 64 << 20
    io_buffer_double: Annotated[Flag, knob("Fill one buffer while the other is written.")] = True
    io_multiplier: Annotated[Positive, knob("Write every buffer this many times, to measure.")] = 1
    show_statistics: Annotated[Flag, knob("Print the writer's speed.")] = False
    data_parallel: Annotated[Literal["replica", "socket", "machine"] | None, knob("Which ranks share the writing.")] = (
        None
    )
    decoupled: Annotated[Flag, knob("Write while training goes on.")] = False


class Checkpoint(Section):
    """Saving and loading."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(_capitalised),
        knob(
            "What to do where the ranks give different tags.",
            status=Status.PLANNED,
            why="compare the tags of the ranks",
            harmless=True,
            idle=("Warn",),
        ),
    ] = "Warn"
    load_universal: Annotated[
        Flag,
        knob(
            "Load a checkpoint converted to DeepSpeed's universal format.",
            status=Status.NO_MEANING,
            why="every dsrun checkpoint loads on any number of ranks without conversion",
        ),
    ] = False
    use_node_local_storage: Annotated[
        Flag,
        knob(
            "Every node has its own folder for checkpoints, not a shared one.",
            status=Status.PLANNED,
            why="save to storage that the nodes do not share",
        ),
    ] = False
    parallel_write: Annotated[ParallelWrite, knob("Who writes what.")] = unset(ParallelWrite)
    checkpoint_serialization: Annotated[
        Flag,
        knob("Use torch's own serialisation.", status=Status.NO_MEANING, why=_SAFETENSORS, idle=(True,)),
    ] = True
    writer: Annotated[Writer | None, knob("Buffers of the writer.", status=Status.NO_MEANING, why=_SAFETENSORS)] = None
