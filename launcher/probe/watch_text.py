"""The live view of `dsrun probe --watch`: what hosts do -> lines. Asks nobody and reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dsrun.units import format_bytes

from ..jobs.text import align
from .watch import GpuLoad, Load

_HOSTS = ("HOST", "CPU", "MEMORY", "NET IN", "NET OUT", "READ", "WRITTEN")
_GPUS = ("GPU", "BUSY", "MEMORY", "TEMP", "POWER", "HELD BACK BY", "PROCESSES")
_GPUS_OF_HOSTS = ("HOST", "GPUS", "BUSY", "MEMORY", "HOTTEST", "HELD BACK")
#: With more hosts a row for each GPU no longer fits a screen.
_MOST_DETAILED = 4


def watch_lines(loads: Mapping[str, Load | str]) -> list[str]:
    """Draws all hosts: a table of hosts, and one of their GPUs; hosts that tell nothing stand last, with the reason.

    Args:
        loads: load of each host, or the reason why it is not known, by host name.
    """
    known = {name: load for name, load in loads.items() if isinstance(load, Load)}
    lines = align([_HOSTS, *(_host(name, load) for name, load in known.items())]) if known else []
    with_gpus = {name: load.gpus for name, load in known.items() if load.gpus}
    if len(loads) > _MOST_DETAILED and with_gpus:
        lines += ["", *align([_GPUS_OF_HOSTS, *(_all_gpus(name, gpus) for name, gpus in with_gpus.items())])]
    elif with_gpus:
        lines += ["", *align([_GPUS, *_each_gpu(with_gpus, named=len(loads) > 1)])]
    return lines + [f"{name}  {reason}" for name, reason in loads.items() if isinstance(reason, str)]


def _host(name: str, load: Load) -> tuple[str, ...]:
    return (
        name,
        f"{load.cpu_percent:.0f}% of {load.cores}",
        _memory(load.memory_used_bytes, load.memory_total_bytes),
        *_moved(load.network),
        *_moved(load.disk),
    )


def _moved(rates: Mapping[str, tuple[float, float]]) -> tuple[str, str]:
    return _rate(sum(into for into, _ in rates.values())), _rate(sum(out for _, out in rates.values()))


def _rate(bytes_s: float) -> str:
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_s >= scale:
            return f"{bytes_s / scale:.1f} {unit}"
    return f"{bytes_s / 1e3:.0f} kB/s" if bytes_s else "-"


def _each_gpu(gpus: Mapping[str, Sequence[GpuLoad]], *, named: bool) -> Iterator[tuple[str, ...]]:
    for name, its in gpus.items():
        for gpu in its:
            yield (
                f"{name}:{gpu.index}" if named else f"{gpu.index}",
                _percent(gpu.utilization_percent),
                _memory(gpu.memory_used_bytes, gpu.memory_total_bytes),
                "-" if gpu.temperature_c is None else f"{gpu.temperature_c} °C",
                _power(gpu),
                ", ".join(gpu.held_back_by) or "-",
                ", ".join(map(_process, gpu.processes)) or "-",
            )


def _all_gpus(name: str, gpus: Sequence[GpuLoad]) -> tuple[str, ...]:
    busy, heat = _known(gpu.utilization_percent for gpu in gpus), _known(gpu.temperature_c for gpu in gpus)
    used, total = _known(gpu.memory_used_bytes for gpu in gpus), _known(gpu.memory_total_bytes for gpu in gpus)
    held = [f"{gpu.index}: {', '.join(gpu.held_back_by)}" for gpu in gpus if gpu.held_back_by]
    return (
        name,
        str(len(gpus)),
        f"{min(busy)} to {max(busy)}%" if busy else "-",
        _memory(sum(used), sum(total)) if used and total else "-",
        f"{max(heat)} °C" if heat else "-",
        "; ".join(held) or "-",
    )


def _known(values: Iterable[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _percent(value: int | None) -> str:
    return "-" if value is None else f"{value}%"


def _memory(used: int | None, total: int | None) -> str:
    """`1.6 of 23.5 GiB`: the unit once where both have it."""
    if used is None or total is None:
        return "-"
    (value, unit), (most, of_unit) = format_bytes(used).split(), format_bytes(total).split()
    return f"{value} of {most} {unit}" if unit == of_unit else f"{value} {unit} of {most} {of_unit}"


def _power(gpu: GpuLoad) -> str:
    limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
    return "-" if gpu.power_w is None else f"{gpu.power_w:.0f}{limit} W"


def _process(process: Mapping[str, object]) -> str:
    size = process["memory_bytes"]
    words = [process["user"], process["command"], process["pid"], format_bytes(size) if isinstance(size, int) else None]
    return " ".join(str(word) for word in words if word is not None)
