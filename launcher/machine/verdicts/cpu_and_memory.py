"""Whether the processor and the memory give what the machine has: rules over a report, pure."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.units import format_bytes

from ..report import ProbeReport
from ..verdict import ProbeVerdict
from .limits import FEW_PROCESSES

#: Less is swapped out of any machine that has been up for a month.
_SWAPPED_BYTES = 1 << 30
#: Their `powersave` still clocks up under load.
_SELF_CLOCKING = ("intel_pstate", "amd-pstate-epp")


def memory_verdicts(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Judges limits, swap and huge pages of a host's memory."""
    memory, group = report.memory, report.cgroup
    limit, total = group.memory_limit_bytes, memory.total_bytes
    # Who got two of eight GPUs may well have got a quarter of the memory.
    share = report.gpus_usable / len(report.gpus) if report.gpus and report.gpus_usable else 1.0
    if limit is not None and total is not None and limit < total * min(share, 1.0) / 2:
        text = f"the cgroup allows {format_bytes(limit)} of the machine's {format_bytes(total)}"
        fix = "ask the scheduler for more (`--mem`), or start the container with a larger `--memory`"
        yield ProbeVerdict(level="amber", text=text, fix=fix, path="cgroup.memory_limit_bytes")
    if group.oom_kills:
        text = f"the kernel killed {_count(group.oom_kills, 'process', 'processes')} of this cgroup for memory"
        yield ProbeVerdict(level="note", text=text, fix="`dsrun plan` tells what a job needs", path="cgroup.oom_kills")
    if memory.swap_total_bytes is not None and memory.swap_free_bytes is not None:
        used = memory.swap_total_bytes - memory.swap_free_bytes
        if used >= _SWAPPED_BYTES:
            text = f"swap {format_bytes(used)} in use: what is swapped out comes back at the speed of a disk"
            fix = "end what holds the memory (`ps aux --sort -rss`), then `swapoff -a; swapon -a`"
            yield ProbeVerdict(level="amber", text=text, fix=fix, path="memory.swap_free_bytes")
    if memory.transparent_huge_pages == "never":
        fix = "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
        text = "transparent huge pages are off: steps on the CPU and pinned buffers are slower"
        yield ProbeVerdict(level="note", text=text, fix=fix, path="memory.transparent_huge_pages")


def cpu_verdicts(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Judges cores, clocks and the number of processes that a host allows."""
    cpu, group = report.cpu, report.cgroup
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.cores_in_affinity:
        text = f"a quota of {cpu.quota_cores:g} cores on {cpu.cores_in_affinity} CPUs"
        text += ": threads are stopped when it is used up"
        fix = "raise the container's `--cpus`, or give whole CPUs with `--cpuset-cpus`"
        yield ProbeVerdict(level="amber", text=text, fix=fix, path="cpu.quota_cores")
    if cpu.governor is not None and "powersave" in cpu.governor.split(", "):
        lazy = cpu.frequency_driver not in _SELF_CLOCKING
        text = f"CPU governor powersave ({cpu.frequency_driver or 'unknown driver'})"
        text += ": clocks stay low" if lazy else ": clocks rise late"
        yield ProbeVerdict(
            level="amber" if lazy else "note",
            text=text,
            fix="`cpupower frequency-set -g performance`",
            path="cpu.governor",
        )
    if group.pids_limit is not None and group.pids_limit < FEW_PROCESSES:
        text = f"the cgroup allows {group.pids_limit} processes and threads"
        yield ProbeVerdict(
            level="amber",
            text=text,
            fix="`docker run --pids-limit=-1`, or TasksMax= of the unit",
            path="cgroup.pids_limit",
        )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
