"""Who is on a GPU or MIG slice, as the driver tells, and who of them counts. Judges nothing.

[Note: users of a GPU] Who computes there is listed, clients of MPS in a list of their own. Who draws there does not
count (a desktop stays), unless it computes as well and has more than a desktop's part. Processes of other containers
are in no list, but their memory is in use: what nobody listed has, beyond a driver's own need, is theirs. Where the
GPU's memory is a NUMA node of the host (GH200, GB200), the kernel puts page cache there, and gives it back when it is
needed: there the lists alone count. In WSL no list has the desktop of Windows, to which up to half of it is put down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .nvml import ask

#: Monitors and MPS daemons keep less than this on a GPU; a CUDA context alone is more.
LITTLE_BYTES = 100 << 20
#: More than any driver keeps for itself, and than a browser computes in. See [Note: users of a GPU].
UNSEEN_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU; None where the driver or the kernel does not show it (containers).

    Attributes:
        pid: process id, as this process sees it.
        user: name of the user it runs as.
        memory_bytes: bytes of the GPU's memory that it has.
        is_desktop: whether it draws there too and has no more memory than a desktop's program.
    """

    pid: int
    user: str | None
    memory_bytes: int | None
    is_desktop: bool = False

    @property
    def holds_memory(self) -> bool:
        """Whether it has more memory than a monitor. Unknown memory counts: nothing says it is small."""
        return self.memory_bytes is None or self.memory_bytes > LITTLE_BYTES

    @property
    def counts(self) -> bool:
        """Whether it uses the GPU, as monitors and desktops do not."""
        return not self.is_desktop and self.holds_memory

    @property
    def label(self) -> str:
        """Who it is, for people."""
        return f"pid {self.pid}" if self.user is None else f"pid {self.pid} of user {self.user}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsers:
    """Who is on a GPU or slice.

    Attributes:
        processes: those that compute there; None where the driver does not show them.
        desktop_bytes: memory of what draws there and does not count.
        unseen_bytes: memory of processes that cannot be seen from here.
    """

    processes: tuple[GpuProcess, ...] | None
    desktop_bytes: int
    unseen_bytes: int


def read_users(
    nvml: Any, handle: Any, *, used_bytes: int, desktop_most_bytes: int, user_of: Callable[[int], str | None]
) -> GpuUsers:
    """Asks who is on a GPU or slice. See [Note: users of a GPU].

    Args:
        nvml: the open driver.
        handle: NVML's handle of the GPU or slice.
        used_bytes: memory in use there.
        desktop_most_bytes: most bytes of memory without an owner that are put down to a desktop, as in WSL.
        user_of: function that returns the user of a process; None if it cannot be told.
    """
    listed = running_on(nvml, handle)
    computing = listed or {}
    drawing = {
        process.pid: process.usedGpuMemory
        for process in ask(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle) or ()
    }
    desktop = {
        pid: has for pid, has in drawing.items() if pid not in computing or (has is not None and has <= UNSEEN_BYTES)
    }
    together = {**drawing, **computing}
    unseen_bytes = used_bytes - sum(has or 0 for has in together.values())
    desktop_bytes = sum(has or 0 for has in desktop.values())
    # Whoever's memory the driver does not tell may have all of it.
    if unseen_bytes <= UNSEEN_BYTES or None in together.values() or _is_host_memory(nvml, handle):
        unseen_bytes = 0
    elif unseen_bytes <= desktop_most_bytes:
        desktop_bytes, unseen_bytes = desktop_bytes + unseen_bytes, 0
    processes = tuple(
        GpuProcess(pid=pid, user=user_of(pid), memory_bytes=has, is_desktop=pid in desktop)
        for pid, has in computing.items()
    )
    return GpuUsers(
        processes=None if listed is None else processes, desktop_bytes=desktop_bytes, unseen_bytes=unseen_bytes
    )


def running_on(nvml: Any, handle: Any) -> dict[int, int | None] | None:
    """Returns the processes that compute on a GPU or slice, clients of MPS too, with their memory.

    Args:
        nvml: the open driver.
        handle: NVML handle of the GPU or slice.

    Returns:
        pid -> bytes, None where the driver does not tell how much; None where it shows no process.
    """
    computing: Sequence[Any] | None = ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    clients: Sequence[Any] | None = ask(nvml, "nvmlDeviceGetMPSComputeRunningProcesses", handle)
    if computing is None and not clients:
        # A driver may tell that there is no client of MPS, and not who else computes.
        return None
    return {process.pid: process.usedGpuMemory for process in (*(computing or ()), *(clients or ()))}


def _is_host_memory(nvml: Any, handle: Any) -> bool:
    """Whether the GPU's memory is a NUMA node of the host; only such platforms answer."""
    return ask(nvml, "nvmlDeviceGetNumaNodeId", handle) is not None
