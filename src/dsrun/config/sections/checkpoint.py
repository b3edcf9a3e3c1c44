"""Schema of `checkpoint`, `datastates_ckpt` and their writers: how a run is saved."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dsrun.config.knob import Section, Status, knob, unset
from dsrun.config.values import Flag, Positive, PositiveNumber

_SAFETENSORS = "tensors are always written as plain safetensors"


def _capitalised(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


class ParallelWrite(Section):
    """Who writes what."""

    default_status = Status.NO_MEANING
    default_reason = "every rank writes the ranges that it owns, with pipeline stages too"

    pipeline_stage: Annotated[Flag, knob("Every data-parallel rank writes a part of its pipeline stage.")] = False


class Writer(Section):
    """Buffers of the writer."""

    default_status = Status.NO_MEANING
    default_reason = _SAFETENSORS

    type: Annotated[Literal["mock", "python", "fast"], knob("Writer by name.")] = "fast"
    io_buffer_size: Annotated[Positive, knob("Size of a write buffer.", unit="bytes")] = 64 << 20
    io_buffer_double: Annotated[Flag, knob("Fill one buffer while the other is written.")] = True
    io_multiplier: Annotated[Positive, knob("Write every buffer this many times, to measure.")] = 1
    show_statistics: Annotated[Flag, knob("Print the writer's speed.")] = False
    data_parallel: Annotated[Literal["replica", "socket", "machine"] | None, knob("Which ranks share the writing.")] = (
        None
    )
    decoupled: Annotated[Flag, knob("Write while training goes on.")] = False


class MemoryCopy(Section):
    """Copies of the state in memory, for a job that is started again."""

    every: Annotated[
        Positive | None,
        knob(
            "Copy the state to the host's shared memory, and on several hosts to that of the next one, so often; null: "
            "never. A job that `dsrun --max-restarts` starts again goes on from there, if it is newer than the disk.",
            unit="steps",
            effect="host memory for two copies of a host's state, four where there are several hosts; what training "
            "stops for is one copy",
        ),
    ] = None


class Checkpoint(Section):
    """Saving and loading."""

    asynchronous: Annotated[
        Flag,
        knob(
            "Write checkpoints while training goes on: `save_checkpoint` returns after one copy of the state.",
            effect="host memory for a copy of this rank's state; false: none, and training waits for the disk",
            differs="writes before it returns",
        ),
    ] = True
    when_copied: Annotated[
        Literal["at_once", "behind"],
        knob(
            "When an asynchronous save copies this rank's state: before `save_checkpoint` returns, or behind the next "
            "forward and backward.",
            effect='"behind" does not stop training for the copy; the next step of each unit waits until its copy is '
            "done, and a save fails whose parameters the script changes by itself before that",
        ),
    ] = "at_once"
    when_busy: Annotated[
        Literal["wait", "refuse"],
        knob("What `save_checkpoint` does while an earlier checkpoint is still being written: wait, or raise."),
    ] = "wait"
    keep_last: Annotated[
        Positive | None,
        knob(
            "Keep so many of the newest checkpoints named `global_step<N>`, and remove older ones; null keeps all.",
            effect="other tags, and the one that `latest` names, are never removed",
        ),
    ] = None
    keep_every: Annotated[
        Positive | None,
        knob("Keep every checkpoint whose step is a multiple of it, whatever `keep_last` says.", unit="steps"),
    ] = None
    frozen_parameters: Annotated[
        Literal["copy", "reference"],
        knob(
            "Have every checkpoint hold its own copy of parameters that are not trained, or write them once.",
            effect="reference: later checkpoints name the same file (hard link), and each can be removed or moved "
            "alone; every save reads the frozen values to see that they are the same",
            differs="writes them with every checkpoint",
        ),
    ] = "copy"
    timeout: Annotated[
        PositiveNumber,
        knob("How long a rank whose part of a checkpoint is written waits for the others' parts.", unit="seconds"),
    ] = 1800.0
    memory_copy: Annotated[MemoryCopy, knob("Copies in memory, for a job that is started again.")] = unset(MemoryCopy)
    save_on_signal: Annotated[
        str | None,
        knob(
            "Folder or address in which a run saves a checkpoint when a signal asks it to end; null ends it without.",
            effect="the optimizer step under way is finished and saved, then the run ends with 128 + the signal's "
            "number; the launcher's grace has to cover both",
        ),
    ] = None
    signals: Annotated[
        list[Literal["SIGTERM", "SIGUSR1", "SIGUSR2"]],
        knob(
            "Signals that `save_on_signal` answers to.",
            effect="SIGUSR1 is what Slurm can send before a time limit",
            expects='a list of "SIGTERM", "SIGUSR1" and "SIGUSR2", or some of them',
        ),
    ] = Field(default=["SIGTERM"], min_length=1)
    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(_capitalised),
        knob(
            "What to do where the ranks give different tags: save under rank 0's, in silence or with a line that names "
            "the others, or fail on every rank before anything is written.",
        ),
    ] = "Warn"
    load_universal: Annotated[
        Flag,
        knob(
            "Have `load_checkpoint` without a tag load the checkpoint that `latest_universal` names, if there is one.",
            effect="none where there is no such file: every dsrun checkpoint loads on any number of ranks",
        ),
    ] = False
    use_node_local_storage: Annotated[
        Flag,
        knob(
            "Every node has its own folder for checkpoints, not a shared one.",
            status=Status.PLANNED,
            reason="save to storage that the nodes do not share",
        ),
    ] = False
    parallel_write: Annotated[ParallelWrite, knob("Who writes what.")] = unset(ParallelWrite)
    checkpoint_serialization: Annotated[
        Flag,
        knob("Use torch's own serialisation.", status=Status.NO_MEANING, reason=_SAFETENSORS, idle=(True,)),
    ] = True
    writer: Annotated[Writer | None, knob("Buffers of the writer.", status=Status.NO_MEANING, reason=_SAFETENSORS)] = (
        None
    )
