"""How long a step with offload takes at least, from what was measured beside it: arithmetic, nothing is run here.

Source: schedule S2 of ZeRO-Offload's successors, exact with clipping: the host steps in forward order once the norm is
known, while the next forward goes on; what crosses a bus hides behind what computes at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

#: Bytes an element: of a parameter or a gradient in bf16, of the host's step, of Adam's states and master on a drive.
_HALF, _STEP, _DISK = 2, 28, 12


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes a second.

    Attributes:
        to_device: bytes per second of page-locked copies to the device.
        to_host: bytes per second of page-locked copies to the host.
        host_step: bytes per second of an Adam-shaped stream over host memory.
        disk_read: bytes per second of large direct reads from the drive; 0 where the drive could not be measured.
        disk_write: bytes per second of large direct writes to the drive; 0 where the drive could not be measured.
    """

    to_device: float
    to_host: float
    host_step: float
    disk_read: float = 0.0
    disk_write: float = 0.0

    def has(self, tier: str) -> bool:
        """Returns whether what a tier's floor is made of was measured."""
        return tier != "disk" or self.disk_read > 0


def floor_s(
    tier: str, *, numel: int, micro_batches: int, forward_s: float, backward_s: float, machine: Machine
) -> float:
    """Returns the least seconds of a step.

    Args:
        tier: gpu, cpu, ram or disk, as in `offload.py`.
        numel: parameters of the model.
        micro_batches: number of micro batches in a step.
        forward_s: seconds of the forward of one micro batch, where the device only computes.
        backward_s: seconds of the backward of one micro batch, where the device only computes, recomputation included.
        machine: measured speeds of the machine, in bytes per second.
    """
    if tier == "gpu":
        return micro_batches * (forward_s + backward_s)
    gradients = (_HALF if micro_batches == 1 else 2 * _HALF) * numel / machine.to_host
    update = max(_STEP * numel / machine.host_step, _HALF * numel / machine.to_device)
    if tier == "disk":
        update = max(update, _DISK * numel * (1 / machine.disk_read + 1 / machine.disk_write))
    fetch = 0.0 if tier == "cpu" else _HALF * numel / machine.to_device
    others = (micro_batches - 1) * (max(forward_s, fetch) + max(backward_s, fetch))
    return others + max(backward_s, fetch, gradients) + max(forward_s, fetch, update)


def rows(parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns each measured step beside its floor, where both were measured.

    Args:
        parts: rows of the check by name: `floors`, `offload SIZE compute` and `offload SIZE CONTENDER`.
    """
    found: list[dict[str, Any]] = []
    machine = _machine(parts.get("floors", {}).get("result", {}))
    for name, part in parts.items():
        words = name.split()
        if words[0] != "offload" or "rows" not in part.get("result", {}) or words[2] == "compute":
            continue
        numel = part["result"]["parameters"]
        tier = words[2].partition("-")[2]
        alone = parts.get(f"offload {words[1]} compute", {}).get("result")
        for row in part["result"]["rows"]:
            seconds = sorted(row["seconds"])[len(row["seconds"]) // 2]
            one: dict[str, Any] = {
                "size": words[1],
                "contender": words[2],
                "tokens": row["tokens"],
                "seconds": seconds,
                "tokens_per_s": row["tokens"] / seconds,
                # Two for a multiplication and an addition, forward and twice backward; recomputation is not counted.
                "tflops": 6 * numel * row["tokens"] / seconds / 1e12,
                "peak_bytes": row.get("peak_bytes"),
            }
            compute = next((each for each in alone["rows"] if each["tokens"] == row["tokens"]), None) if alone else None
            if machine is not None and machine.has(tier) and compute:
                least_s = floor_s(
                    tier,
                    numel=numel,
                    micro_batches=row["micro_batches"],
                    forward_s=compute["forward_s"],
                    backward_s=compute["backward_s"],
                    machine=machine,
                )
                one |= {"floor_s": least_s, "of_floor": least_s / seconds}
            found.append(one)
    return found


def _machine(floors: Mapping[str, Any]) -> Machine | None:
    known = {field.name for field in fields(Machine)}
    measured = {name: value for name, value in floors.items() if name in known}
    return Machine(**measured) if {"to_device", "to_host", "host_step"} <= set(measured) else None
