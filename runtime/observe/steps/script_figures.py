"""Figures that a script gives its engine, on their way to the records; none is waited for on a device."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dsrun.contract.step_records import LOG_EVENT, LogRecord, log_fields
from dsrun.errors import ModelError

from ..records import RecordWriter


class Copied(Protocol):
    """A point of a stream behind a copy; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Returns whether the device has come to it."""
        ...

    def synchronize(self) -> None:
        """Returns when the device has come to it."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Figures of which some are on their way to the host.

    Attributes:
        record: Record of the figures that are known.
        coming: Figures that are copied, by name: their place on the host, and the point behind the copy.
    """

    record: LogRecord
    coming: Mapping[str, tuple[Tensor, Copied]]


def copy_from_gpu(value: Tensor) -> tuple[Tensor, Copied]:
    """Has a GPU copy a number to page-locked memory, behind the work that computes it; waits for nothing.

    Args:
        value: Tensor of one element.

    Returns:
        place of the number, fp64, and the point behind the copy.
    """
    place = torch.empty((), dtype=torch.float64, pin_memory=True)
    place.copy_(value.detach().reshape(()), non_blocking=True)
    return place, torch.cuda.current_stream(value.device).record_event()


class ScriptFigures:
    """Records what a script logs, without a wait for the device.

    Args:
        records: Writer of the run's records.
        is_first: Whether this rank speaks for the job; the others' figures are only checked.
        copy: Function that has a device copy a number to the host, see `copy_from_gpu`.
    """

    def __init__(
        self,
        records: RecordWriter,
        *,
        is_first: bool,
        copy: Callable[[Tensor], tuple[Tensor, Copied]] = copy_from_gpu,
    ) -> None:
        self._records = records
        self._copy = copy
        self._is_first = is_first
        self._waiting: deque[_Waiting] = deque()
        # A script may log behind its last step.
        weakref.finalize(self, _record_all, records, self._waiting)

    def log(self, values: Mapping[str, Tensor | float], *, step: int, samples: int) -> None:
        """Takes figures of the script.

        Args:
            values: Numbers by name; tensors of one element, on any device.
            step: Optimizer steps that were taken before.
            samples: Samples of those.

        Raises:
            ModelError: a name or a value is none; all of them are named.
        """
        wrong = [text for name, value in values.items() if (text := _problem(name, value))]
        if wrong:
            raise ModelError(
                f"engine.log: {'; '.join(wrong)}",
                hint='expected a dict like {"eval/loss": 2.3}: names, and numbers or tensors of one element',
            )
        if not (self._is_first and self._records.is_kept):
            return
        self.settle()  # an engine that only evaluates takes no step that would
        coming: dict[str, tuple[Tensor, Copied]] = {}
        known: dict[str, float | None] = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                coming[name] = self._copy(value)
            else:
                known[name] = _finite(float(value.detach() if isinstance(value, Tensor) else value))
        record = LogRecord(step=step, time=time.time(), values=known, samples=samples)
        if not coming and not self._waiting:
            self._records.write_behind(LOG_EVENT, partial(log_fields, record))
            return
        self._waiting.append(_Waiting(record, coming))

    def settle(self) -> None:
        """Records the figures that have come; waits for none."""
        while self._waiting and all(copied.query() for _, copied in self._waiting[0].coming.values()):
            _record(self._records, self._waiting.popleft())


def _record(records: RecordWriter, waiting: _Waiting) -> None:
    come = {name: _finite(float(place)) for name, (place, _) in waiting.coming.items()}
    record = replace(waiting.record, values={**waiting.record.values, **come})
    records.write_behind(LOG_EVENT, partial(log_fields, record))


def _record_all(records: RecordWriter, waiting: deque[_Waiting]) -> None:
    """Records what is left at the end, where the device may have failed: the script has been told of that."""
    with suppress(RuntimeError):
        while waiting:
            each = waiting.popleft()
            for _, copied in each.coming.values():
                copied.synchronize()
            _record(records, each)


def _problem(name: object, value: object) -> str | None:
    """Returns what is wrong with a figure; None where nothing is."""
    if not isinstance(name, str) or not name:
        return f"a name is {name!r}"
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return f"`{name}` is a tensor of shape {tuple(value.shape)} and {value.dtype}"
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return f"`{name}` is a {type(value).__name__}"
    try:
        float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError) as error:  # an array, a number of 400 digits
        return f"`{name}` is a {type(value).__name__} ({error})"
    return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
