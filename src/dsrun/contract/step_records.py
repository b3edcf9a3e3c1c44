"""Records of optimizer steps: written by rank 0 of a run, read by all that watches one. Measures and judges nothing.

[Note: records of a run] Each line of a job's records (`JobPaths.records`) is one object with `event`, `time` in seconds
since the epoch, and the event's own fields. Rank 0 of an attempt begins with the event `start`; each optimizer step is
a `step`, and every so many steps a `spread` compares the ranks in them. A job that is started again goes on in the same
file with another `start`, and may take steps again that were taken before: the newer record counts, see
`launcher/records`. A reader passes over events and fields that it does not know, and over half a line at the end.

[Note: phases of a step] A step's seconds are divided into phases that exclude each other and add up to them, see
`PHASES`. Waits for other ranks are counted beside them, in whatever phase they were: `waits_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

#: Event of an optimizer step; its fields are those of `StepRecord`.
STEP_EVENT = "step"
#: Event of what some steps took on all ranks; its fields are those of `SpreadRecord`.
SPREAD_EVENT = "spread"
#: Event of the script's own figures, see `LogRecord`.
LOG_EVENT = "log"

#: Phases of a step: the loader of the engine draws a batch, the script does what the engine does not see, the model's
#: forward up to its backward, backward with the reduction, the update, a checkpoint that training waits for, and the
#: model's forward without gradients.
PHASES = ("data", "script", "forward", "backward", "step", "save", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step. Figures of the whole job, but where rank 0 is named.

    Attributes:
        step: Number of the step, counted from 1.
        time: Seconds since the epoch at its end.
        seconds: Seconds since the end of the step before, on rank 0.
        samples: Samples of all steps so far.
        lr: Learning rate of the first group.
        applied: Whether the update was taken.
        loss: Mean loss; None where it is not known, or is not finite.
        lrs: Learning rates of all groups, where there are several.
        grad_norm: Norm of all gradients before clipping; None where it is not finite.
        loss_scale: Factor of the losses; None where it is 1.
        non_finite: Name of a parameter whose gradient is not finite; None where there is none.
        total_steps: Steps of the whole run; None where nothing says it.
        tokens: Tokens that the ranks put in, counted, without padding that an attention mask tells; None where
            the model takes none.
        tokens_padded: Tokens with padding; None where there is none.
        tokens_in_loss: Tokens with a label that counts; None where labels are not seen.
        tokens_per_s: Value of `tokens` a second.
        model_tflops: TFLOP/s of the model's forward and backward, each operation once; None where they are not known.
        hardware_tflops: TFLOP/s with what is computed again.
        mfu: Share of the devices' peak that `model_tflops` is; None where the peak is not known.
        hfu: Share of the devices' peak that `hardware_tflops` is.
        memory_bytes: Most bytes of rank 0's device so far; where that is a CPU, resident bytes now.
        memory: Bytes of rank 0 in use by tier: `gpu`, `cpu` (resident), `disk`.
        phases: Seconds by phase on rank 0, see [Note: phases of a step].
        waits_s: Seconds that rank 0 has waited for other ranks; None where it has none.
        pipeline_wait_s: Seconds of these that it has waited for other pipeline stages; None where there are none.
        traffic: Bytes that rank 0 has handed to collectives and messages, by axis.
    """

    step: int
    time: float
    seconds: float
    samples: int
    lr: float
    applied: bool
    loss: float | None = None
    lrs: tuple[float, ...] = ()
    grad_norm: float | None = None
    loss_scale: float | None = None
    non_finite: str | None = None
    total_steps: int | None = None
    tokens: int | None = None
    tokens_padded: int | None = None
    tokens_in_loss: int | None = None
    tokens_per_s: float | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    memory_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    phases: Mapping[str, float] = field(default_factory=dict[str, float])
    waits_s: float | None = None
    pipeline_wait_s: float | None = None
    traffic: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpread:
    """One figure of each of some steps, over the ranks.

    Attributes:
        least: Value of the rank that has least, one a step.
        median: Median of the ranks, one a step.
        most: Value of the rank that has most, one a step.
        most_rank: Rank that has most in all these steps together.
    """

    least: tuple[float, ...]
    median: tuple[float, ...]
    most: tuple[float, ...]
    most_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadRecord:
    """What some steps took on all ranks.

    Attributes:
        step: Number of the last of the steps.
        steps: Number of steps.
        ranks: Number of ranks.
        seconds: Seconds by phase (`PHASES`), and in `waits` and `pipeline_wait` those that `StepRecord` has of rank 0.
        memory: Bytes in use by tier at the last of the steps, one value each.
    """

    step: int
    steps: int
    ranks: int
    seconds: Mapping[str, StepSpread]
    memory: Mapping[str, StepSpread] = field(default_factory=dict[str, StepSpread])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """Figures that the script has given to `engine.log`.

    Attributes:
        step: Optimizer steps that were taken before.
        time: Seconds since the epoch.
        values: Figures by name; None where one is not finite.
        samples: Samples of those steps.
    """

    step: int
    time: float
    values: Mapping[str, float | None]
    samples: int = 0


_STEP_FIELDS = tuple(each.name for each in fields(StepRecord))
#: Fields that a step is written with, whatever they are.
_ALWAYS = frozenset({"step", "time", "seconds", "samples", "lr", "applied", "grad_norm", "memory_bytes"})


def step_fields(record: StepRecord) -> dict[str, Any]:
    """Returns the fields of a step as JSON holds them: what is not known, and what is empty, is left out.

    Args:
        record: Step to write down.
    """
    told: dict[str, Any] = {}
    for name in _STEP_FIELDS:
        value = getattr(record, name)
        if name in _ALWAYS or (value is not None and value != () and value != {}):
            told[name] = value
    del told["time"]  # the writer puts the time of each record
    return told


def read_step(record: Mapping[str, Any]) -> StepRecord:
    """Reads a record of a step; fields that this version does not know are left out.

    Raises:
        KeyError: a field is missing.
    """
    known: dict[str, Any] = {name: value for name, value in record.items() if name in _STEP_FIELDS}
    missing = [name for name in ("step", "time", "seconds", "samples", "lr", "applied") if name not in known]
    if missing:
        raise KeyError(*missing)
    known["lrs"] = tuple(known.get("lrs", ()))
    return StepRecord(**known)


def spread_fields(record: SpreadRecord) -> dict[str, Any]:
    """Returns the fields of a comparison as JSON holds them."""
    return {
        "step": record.step,
        "steps": record.steps,
        "ranks": record.ranks,
        "seconds": {name: _spread_fields(each) for name, each in record.seconds.items()},
        "memory": {tier: _spread_fields(each) for tier, each in record.memory.items()},
    }


def read_spread(record: Mapping[str, Any]) -> SpreadRecord:
    """Reads a record that compares ranks.

    Raises:
        KeyError: a field is missing.
    """
    return SpreadRecord(
        step=record["step"],
        steps=record["steps"],
        ranks=record["ranks"],
        seconds={name: _read_spread(each) for name, each in record["seconds"].items()},
        memory={tier: _read_spread(each) for tier, each in record.get("memory", {}).items()},
    )


def log_fields(record: LogRecord) -> dict[str, Any]:
    """Returns the fields of a script's figures as JSON holds them."""
    return {"step": record.step, "samples": record.samples, "values": dict(record.values)}


def read_log(record: Mapping[str, Any]) -> LogRecord:
    """Reads a record of a script's figures.

    Raises:
        KeyError: a field is missing.
    """
    return LogRecord(
        step=record["step"], time=record["time"], values=record["values"], samples=record.get("samples", 0)
    )


def _spread_fields(spread: StepSpread) -> dict[str, Any]:
    return {
        "least": list(spread.least),
        "median": list(spread.median),
        "most": list(spread.most),
        "most_rank": spread.most_rank,
    }


def _read_spread(spread: Mapping[str, Any]) -> StepSpread:
    return StepSpread(
        least=tuple(spread["least"]),
        median=tuple(spread["median"]),
        most=tuple(spread["most"]),
        most_rank=spread["most_rank"],
    )
