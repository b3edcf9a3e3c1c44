"""What CUDA_VISIBLE_DEVICES names, by CUDA's own rules. Pure: asks no driver, so that the agent can have it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_SLICE_UUID = re.compile(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def listed_devices(
    value: str | None, uuids: Sequence[str | None], *, slices: Collection[str] | None = None
) -> tuple[int | str, ...]:
    """Applies CUDA_VISIBLE_DEVICES by CUDA's own rules, except that a job may have several MIG slices.

    The list ends at the first entry that names no device; a device named twice hides all of them. Of MIG slices a
    process sees the first only, so a job with several gives each rank one of them (`devices.Held`).

    Args:
        value: the variable; None where it is not set.
        uuids: UUIDs of the machine's GPUs, in order, None for an unknown one; an entry of the list may be a unique
            beginning of one.
        slices: UUIDs of its MIG slices; None where nobody told them.

    Returns:
        the devices left, in the order of the list: indices of GPUs and names of MIG slices.
    """
    if value is None:
        return tuple(range(len(uuids)))
    chosen: list[int | str] = []
    for entry in value.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            # Slices that are made anew have other UUIDs. Names that are none (`MIG-GPU-.../1/0`) are CUDA's to read.
            if slices is not None and name not in slices and _SLICE_UUID.fullmatch(name):
                break
            chosen.append(name)
            continue
        matches = [index for index, uuid in enumerate(uuids) if _names(name, index, uuid)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return () if len(set(chosen)) < len(chosen) else tuple(chosen)


def visible_devices(
    value: str | None, uuids: Sequence[str | None], *, slices: Collection[str] | None = None
) -> tuple[int | None, ...]:
    """Returns what `listed_devices` does, with None for a MIG slice."""
    return tuple(entry if isinstance(entry, int) else None for entry in listed_devices(value, uuids, slices=slices))


def _names(entry: str, index: int, uuid: str | None) -> bool:
    if entry.isdecimal():
        return int(entry) == index
    return entry.startswith("GPU-") and uuid is not None and uuid.startswith(entry)
