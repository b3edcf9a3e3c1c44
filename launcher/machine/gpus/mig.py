"""The slices of a GPU in MIG mode, as the driver lists them. Knows nothing of what is asked about them."""

from __future__ import annotations

from typing import Any

from .nvml import ask


def slice_handles(nvml: Any, handle: Any) -> list[tuple[int, Any]] | None:
    """Returns number and handle of each slice of a GPU.

    Args:
        nvml: the open driver.
        handle: NVML handle of the GPU.

    Returns:
        None where it is not in MIG mode; empty where it is and nobody has cut it: then CUDA shows nothing of it.
    """
    mode: Any = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if mode is None or not mode[0]:
        return None
    numbers = range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    parts = ((number, ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)) for number in numbers)
    return [(number, part) for number, part in parts if part is not None]
