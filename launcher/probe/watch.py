"""What changes on a host from second to second: counters of the kernel and the driver, and the rates between two.

Answers for `dsrun probe --watch`, see [Note: questions] in survey/server. Reads /proc and the driver; draws nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsrun.host.memory import read_host_memory

from ..machine.cgroup import read_limits
from ..machine.devices.choice import user_of_process
from ..machine.gpus.nvml import NoDriver, open_nvml
from ..machine.gpus.read import Gpu, list_gpus
from ..machine.gpus.state import read_state
from ..machine.proc_files import read_text

_SECTOR_BYTES = 512
_ROOT = Path("/")

#: Name -> bytes in (received, read) and out (sent, written) since boot.
Counters = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """One GPU now; None where the driver does not say. `processes` are those of `GpuState`, with their `command`."""

    index: int
    utilization_percent: int | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    held_back_by: tuple[str, ...]
    processes: tuple[dict[str, Any], ...]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GpuLoad:
        """Reads what `asdict` has made."""
        lists: dict[str, Any] = {name: tuple(value[name]) for name in ("held_back_by", "processes")}
        return GpuLoad(**{**value, **lists})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A host at one moment.

    Attributes:
        at_s: seconds by a clock of the host; only samples of the same host are compared by it.
        cores: logical processors.
        busy_ticks: clock ticks that all processors together were busy since boot.
        all_ticks: busy and idle.
        memory_used_bytes: bytes of memory in use on the machine, or in the cgroup where its limit is lower.
        memory_total_bytes: bytes of memory that `memory_used_bytes` is a part of: the machine's, or the cgroup's limit
            where that is lower.
        network: bytes received and sent, by name of the network interface, without loopback.
        disk: bytes read and written, by name of the whole drive.
        gpus: load of each GPU, as the driver tells it.
    """

    at_s: float
    cores: int
    busy_ticks: int
    all_ticks: int
    memory_used_bytes: int
    memory_total_bytes: int
    network: Counters
    disk: Counters
    gpus: tuple[GpuLoad, ...]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Sample:
        """Reads what `asdict` has made."""
        return Sample(
            at_s=value["at_s"],
            cores=value["cores"],
            busy_ticks=value["busy_ticks"],
            all_ticks=value["all_ticks"],
            memory_used_bytes=value["memory_used_bytes"],
            memory_total_bytes=value["memory_total_bytes"],
            network={name: (into, out) for name, (into, out) in value["network"].items()},
            disk={name: (into, out) for name, (into, out) in value["disk"].items()},
            gpus=tuple(GpuLoad.from_json(gpu) for gpu in value["gpus"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a host did between two samples.

    Attributes:
        cores: logical processors.
        cpu_percent: busy time of all processors together, in percent.
        memory_used_bytes: bytes of memory in use at the end.
        memory_total_bytes: bytes of memory that `memory_used_bytes` is a part of.
        network: bytes a second in and out, of interfaces that moved any.
        disk: bytes a second read and written, of drives that moved any.
        gpus: load of each GPU at the end.
    """

    cores: int
    cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    network: Mapping[str, tuple[float, float]]
    disk: Mapping[str, tuple[float, float]]
    gpus: tuple[GpuLoad, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return asdict(self)


def load_between(before: Sample, after: Sample) -> Load:
    """Returns what happened between two samples of one host."""
    took_s = max(after.at_s - before.at_s, 1e-6)
    ticks = after.all_ticks - before.all_ticks
    busy = after.busy_ticks - before.busy_ticks
    return Load(
        cores=after.cores,
        cpu_percent=min(100.0, max(0.0, 100.0 * busy / ticks)) if ticks > 0 else 0.0,
        memory_used_bytes=after.memory_used_bytes,
        memory_total_bytes=after.memory_total_bytes,
        network=_rates(before.network, after.network, took_s),
        disk=_rates(before.disk, after.disk, took_s),
        gpus=after.gpus,
    )


def hold(arguments: dict[str, Any], keep: ExitStack) -> bool:
    """Answers `watch_hold`: keeps the driver loaded until the survey is over, which makes each sample cheap.

    Returns:
        whether there is a driver.
    """
    try:
        keep.enter_context(open_nvml())
    except NoDriver:
        return False
    return True


def answer(arguments: dict[str, Any], keep: ExitStack) -> Any:
    """Answers `watch`: a sample of this host; takes no arguments."""
    return asdict(sample())


def sample(
    *, root: Path = _ROOT, clock: Callable[[], float] = time.monotonic, load_nvml: Callable[[], Any] | None = None
) -> Sample:
    """Takes a sample.

    Args:
        root: `/`, or a made-up tree with proc and sys.
        clock: function that returns the time of the sample in seconds.
        load_nvml: function that returns the `pynvml` module; tests give a made-up one.
    """
    cores, busy, everything = parse_stat(read_text(root / "proc/stat") or "")
    memory = read_host_memory(root)
    total = memory.total_bytes or 0
    used = max(0, total - (memory.available_bytes or 0))
    limits = read_limits(root)
    limit, left = limits.memory_limit_bytes, limits.memory_left_bytes
    if limit is not None and left is not None and limit < total:
        total, used = limit, limit - left
    return Sample(
        at_s=clock(),
        cores=cores,
        busy_ticks=busy,
        all_ticks=everything,
        memory_used_bytes=used,
        memory_total_bytes=total,
        network=parse_net_dev(read_text(root / "proc/net/dev") or ""),
        disk=parse_diskstats(
            read_text(root / "proc/diskstats") or "",
            # Partitions are not there; loop, RAID and LVM devices have no hardware of their own.
            is_drive=lambda name: (root / "sys/block" / name / "device").exists(),
        ),
        gpus=_gpus(load_nvml),
    )


def parse_stat(text: str) -> tuple[int, int, int]:
    """Reads /proc/stat: logical processors, ticks they were busy, and all ticks."""
    rows = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    if not rows:
        return 0, 0, 0
    # Guests' time (columns 9 and 10) is in the first two columns already.
    ticks = [int(word) for word in rows[0][1:9]]
    idle = sum(ticks[3:5])
    return len(rows) - 1, sum(ticks) - idle, sum(ticks)


def parse_net_dev(text: str) -> dict[str, tuple[int, int]]:
    """Reads /proc/net/dev: bytes received and sent by interface, loopback left out."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and len(words) >= 9 and name.strip() != "lo":
            found[name.strip()] = int(words[0]), int(words[8])
    return found


def parse_diskstats(text: str, *, is_drive: Callable[[str], bool]) -> dict[str, tuple[int, int]]:
    """Reads /proc/diskstats: bytes read and written by drive.

    Args:
        text: text of /proc/diskstats.
        is_drive: function that tells whether a block device of that name is a whole drive.
    """
    rows = (line.split() for line in text.splitlines())
    return {
        row[2]: (int(row[5]) * _SECTOR_BYTES, int(row[9]) * _SECTOR_BYTES)
        for row in rows
        if len(row) >= 10 and is_drive(row[2])
    }


def _rates(before: Counters, after: Counters, took_s: float) -> dict[str, tuple[float, float]]:
    """Returns what moved; a counter that fell belongs to another device of the same name."""
    found: dict[str, tuple[float, float]] = {}
    for name, (in_now, out_now) in after.items():
        in_then, out_then = before.get(name, (in_now, out_now))
        rates = max(0, in_now - in_then) / took_s, max(0, out_now - out_then) / took_s
        if any(rates):
            found[name] = rates
    return found


def _gpus(load_nvml: Callable[[], Any] | None) -> tuple[GpuLoad, ...]:
    try:
        with open_nvml(load_nvml) as nvml:
            return tuple(_load_of(nvml, gpu) for gpu in list_gpus(nvml, None).gpus if not gpu.lost)
    except NoDriver:
        return ()


def _load_of(nvml: Any, gpu: Gpu) -> GpuLoad:
    state = read_state(nvml, nvml.nvmlDeviceGetHandleByIndex(gpu.index), user_of=user_of_process)
    total, free = gpu.memory_total_bytes, gpu.memory_free_bytes
    return GpuLoad(
        index=gpu.index,
        utilization_percent=state.utilization_percent,
        memory_used_bytes=None if total is None or free is None else total - free,
        memory_total_bytes=total,
        temperature_c=state.temperature_c,
        power_w=state.power_draw_w,
        power_limit_w=state.power_limit_w,
        held_back_by=state.throttle_reasons or (),
        processes=tuple({**asdict(one), "command": _command(one.pid)} for one in state.processes or ()),
    )


def _command(pid: int) -> str | None:
    return (read_text(_ROOT / f"proc/{pid}/comm") or "").strip() or None
