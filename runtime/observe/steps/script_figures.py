"""Figures that a script gives its engine, on their way to the records; none is waited for on a device."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsrun.contract.step_records import LOG_EVENT, LogRecord, log_fields
from dsrun.errors import ModelError

from ..records import RecordWriter


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Figures of which some are on their way to the host.

    Attributes:
        record: Record of the figures that are known.
        coming: Figures that are copied, by name, in page-locked memory.
        copied: Event behind the copies.
    """

    record: LogRecord
    coming: Mapping[str, Tensor]
    copied: Any


class ScriptFigures:
    """Records what a script logs, without a wait for the device.

    Args:
        records: Writer of the run's records.
        is_first: Whether this rank speaks for the job; the others' figures are only checked.
    """

    def __init__(self, records: RecordWriter, *, is_first: bool) -> None:
        self._records = records
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
        coming: dict[str, Tensor] = {}
        known: dict[str, float | None] = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.is_cuda:
                place = torch.empty((), dtype=torch.float64, pin_memory=True)
                coming[name] = place.copy_(value.detach().reshape(()), non_blocking=True)
            else:
                known[name] = _finite(float(value.detach() if isinstance(value, Tensor) else value))
        record = LogRecord(step=step, time=time.time(), values=known, samples=samples)
        if not coming and not self._waiting:
            self._records.write_behind(LOG_EVENT, partial(log_fields, record))
            return
        copied = torch.cuda.current_stream().record_event() if coming else None
        self._waiting.append(_Waiting(record, coming, copied))

    def settle(self) -> None:
        """Records the figures that have come; waits for none."""
        while self._waiting and (self._waiting[0].copied is None or self._waiting[0].copied.query()):
            _record(self._records, self._waiting.popleft())


def _record(records: RecordWriter, waiting: _Waiting) -> None:
    come = {name: _finite(float(value)) for name, value in waiting.coming.items()}
    record = replace(waiting.record, values={**waiting.record.values, **come})
    records.write_behind(LOG_EVENT, partial(log_fields, record))


def _record_all(records: RecordWriter, waiting: deque[_Waiting]) -> None:
    """Records what is left at the end, where the device may have failed: the script has been told of that."""
    with suppress(RuntimeError):
        while waiting:
            each = waiting.popleft()
            if each.copied is not None:
                each.copied.synchronize()
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
    return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
