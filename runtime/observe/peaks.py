"""Predicted and measured memory side by side, once at the end of a run: a line and a record of rank 0."""

from __future__ import annotations

import os
import resource

import torch

from dsrun.units import format_bytes

from .records import RecordWriter


class PeakSummary:
    """What rank 0 says about memory when its engine ends.

    Args:
        records: writer of the summary record.
        rank: rank of this process; only rank 0 reports.
        device: device to report the peak memory of, beside that of the process, if it is a GPU.
        predicted_state_bytes: model state of a rank, as `StatePrediction` has it.
    """

    def __init__(self, records: RecordWriter, *, rank: int, device: torch.device, predicted_state_bytes: int) -> None:
        self._records = records
        self._rank = rank
        self._device = device
        self._predicted_state_bytes = predicted_state_bytes
        self._state_bytes: int | None = None
        # A script that forks takes a copy of this object along, which has nothing to report.
        self._process = os.getpid()

    @property
    def wants_state(self) -> bool:
        """Whether model state is still to be measured: once, after the first update, when all states exist."""
        return self._state_bytes is None

    def take_state(self, measured_bytes: int) -> None:
        """Takes what the rank was measured to hold."""
        self._state_bytes = measured_bytes

    def report(self) -> None:
        """Prints and records the summary, the first time it is called after an update."""
        if self._rank != 0 or self._state_bytes is None or self._process != os.getpid():
            return
        state, self._process = self._state_bytes, -1
        process_peak = process_peak_bytes()
        gpu_peak = torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else None
        self._records.write(
            "memory",
            {
                "state_predicted_bytes": self._predicted_state_bytes,
                "state_bytes": state,
                "process_peak_bytes": process_peak,
                "gpu_peak_bytes": gpu_peak,
            },
        )
        peaks = f"{format_bytes(process_peak)} of host memory"
        peaks += "" if gpu_peak is None else f", {format_bytes(gpu_peak)} of GPU memory"
        print(
            f"dsrun: memory of rank 0: model state {format_bytes(self._predicted_state_bytes)} predicted, "
            f"{format_bytes(state)} measured; peak {peaks}",
            flush=True,
        )


def process_peak_bytes() -> int:
    """Returns the most memory this process has held at once: resident, shared pages included (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
