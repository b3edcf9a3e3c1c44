"""How one GPU fares: memory errors, power, clocks, heat, modes, slices and processes. Judges nothing, sets nothing.

Asked by `dsrun probe` alone: the launch needs only the list (probe_gpu). Numbers of NVML's enumerations are written
out here; they are its ABI and do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .nvml import ask, text_of
from .users import GpuProcess, read_users

#: nvmlClocksEventReason*; idle and the clocks a user set hold nothing back that was not asked for.
_THROTTLE_REASONS = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (software)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
_COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
_UNCORRECTED, _SINCE_BOOT, _LIFETIME = 1, 0, 1
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_DOUBLE_BIT_ERROR = 1
#: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which a user may ask where the kernel's log is closed; and its answers.
_RECOVERY_FIELD = 230
_RECOVERY_ACTIONS = (
    *("none", "reset the GPU", "reboot the node", "drain peer-to-peer", "drain and reset"),
    *("recover the IMEX domain", "reset the bus", "reboot the system"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """A part of a GPU in MIG mode."""

    uuid: str | None
    name: str | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """A GPU at the moment of asking; None where its kind has no such thing or the driver does not tell.

    Attributes:
        ecc_enabled: memory is checked for errors.
        ecc_uncorrected: errors beyond repair since the driver was loaded.
        ecc_uncorrected_lifetime: the same since the GPU was made.
        remapped_rows: rows of memory replaced after such errors (Ampere and later).
        remap_pending: a row waits for a reset to be replaced.
        remap_failed: none was left to replace it with: the GPU is to be exchanged.
        retired_pages: pages given up (before Ampere).
        throttle_reasons: reasons that hold the clocks down, in words; empty if there are none, None where the driver
            does not tell.
        persistence: the driver stays loaded between jobs.
        bar1_bytes: memory others reach over PCIe; all of it with a resizable BAR.
        mig_enabled: whether the GPU is in MIG mode, where CUDA sees its slices only; None where the driver does not
            tell.
        recovery_action: action that the driver asks for on this GPU, such as a reset; `none` if the GPU is well, None
            where the driver does not tell.
    """

    ecc_enabled: bool | None
    ecc_uncorrected: int | None
    ecc_uncorrected_lifetime: int | None
    remapped_rows: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    retired_pages: int | None
    power_draw_w: float | None
    power_limit_w: float | None
    power_limit_default_w: float | None
    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    memory_clock_mhz: int | None
    throttle_reasons: tuple[str, ...] | None
    temperature_c: int | None
    utilization_percent: int | None
    persistence: bool | None
    compute_mode: str | None
    bar1_bytes: int | None
    mig_enabled: bool | None
    mig_slices: tuple[MigSlice, ...]
    processes: tuple[GpuProcess, ...] | None
    recovery_action: str | None = None


def read_state(nvml: Any, handle: Any, *, user_of: Callable[[int], str | None]) -> GpuState:
    """Asks for everything about one GPU.

    Args:
        nvml: the open driver.
        handle: NVML handle of the GPU.
        user_of: function that returns the user of a process by its pid, or None if that cannot be told.
    """
    ecc = ask(nvml, "nvmlDeviceGetEccMode", handle)
    remapped = ask(nvml, "nvmlDeviceGetRemappedRows", handle)
    retired = ask(nvml, "nvmlDeviceGetRetiredPages", handle, _DOUBLE_BIT_ERROR)
    mode = ask(nvml, "nvmlDeviceGetComputeMode", handle)
    rates = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    bar1 = ask(nvml, "nvmlDeviceGetBAR1MemoryInfo", handle)
    mig = ask(nvml, "nvmlDeviceGetMigMode", handle)
    # Only who can be seen is told: memory that nobody listed has may be of this user's own job in a container.
    users = read_users(nvml, handle, used_bytes=0, desktop_most_bytes=0, user_of=user_of)
    return GpuState(
        ecc_enabled=None if ecc is None else bool(ecc[0]),
        ecc_uncorrected=ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_BOOT),
        ecc_uncorrected_lifetime=ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _LIFETIME),
        remapped_rows=None if remapped is None else int(remapped[0]) + int(remapped[1]),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        retired_pages=None if retired is None else len(retired),
        power_draw_w=_watts(ask(nvml, "nvmlDeviceGetPowerUsage", handle)),
        power_limit_w=_watts(ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)),
        power_limit_default_w=_watts(ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        sm_clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
        sm_clock_max_mhz=ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
        memory_clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK),
        throttle_reasons=throttle_words(ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)),
        temperature_c=ask(nvml, "nvmlDeviceGetTemperature", handle, 0),
        utilization_percent=None if rates is None else int(rates.gpu),
        persistence=_flag(ask(nvml, "nvmlDeviceGetPersistenceMode", handle)),
        compute_mode=None if mode is None or mode >= len(_COMPUTE_MODES) else _COMPUTE_MODES[mode],
        bar1_bytes=None if bar1 is None else int(bar1.bar1Total),
        mig_enabled=None if mig is None else bool(mig[0]),
        mig_slices=_slices(nvml, handle) if mig is not None and mig[0] else (),
        processes=users.processes,
        recovery_action=_recovery_action(nvml, handle),
    )


def throttle_words(mask: int | None) -> tuple[str, ...] | None:
    """Returns what holds the clocks down, of NVML's bits; None where it is not told."""
    return None if mask is None else tuple(word for bit, word in _THROTTLE_REASONS.items() if mask & bit)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _recovery_action(nvml: Any, handle: Any) -> str | None:
    found: Sequence[Any] = ask(nvml, "nvmlDeviceGetFieldValues", handle, [_RECOVERY_FIELD]) or ()
    for value in found:
        # The answer is 32 bits of a union of 64.
        number = int(value.value.ullVal) & 0xFFFFFFFF if value.nvmlReturn == 0 else len(_RECOVERY_ACTIONS)
        if value.fieldId == _RECOVERY_FIELD and number < len(_RECOVERY_ACTIONS):
            return _RECOVERY_ACTIONS[number]
    return None


def _slices(nvml: Any, handle: Any) -> tuple[MigSlice, ...]:
    found: list[MigSlice] = []
    for number in range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if part is not None:
            memory = ask(nvml, "nvmlDeviceGetMemoryInfo", part)
            found.append(
                MigSlice(
                    uuid=text_of(ask(nvml, "nvmlDeviceGetUUID", part)),
                    name=text_of(ask(nvml, "nvmlDeviceGetName", part)),
                    memory_total_bytes=None if memory is None else int(memory.total),
                )
            )
    return tuple(found)
