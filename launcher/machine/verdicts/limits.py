"""Limits below which jobs fail or suffer: open files, locked memory, processes, shared memory. Rules over values, pure.

They take parts of a report, so that they hold for all that is known of a host and for the little that preflight asks.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.units import format_bytes

from ..limits import LimitsReport
from ..memory import MemoryReport
from ..verdict import Context, ProbeVerdict

#: Fewer processes and threads than this run out.
FEW_PROCESSES = 4096
#: Fewer open files than this run out: torch hands each tensor of a data loader's worker over as an open file, and the
#: 1024 that most systems give are known to be too few for that.
_FEW_FILES = 4096
_MANY_FILES = 65536
#: With less locked memory than this RDMA fails.
_LITTLE_LOCKED_BYTES = 64 << 20
#: Less shared memory than this is used up by data loaders and by ranks that exchange tensors.
_SMALL_SHM_BYTES = 1 << 30
#: Less room in it than this is none.
_LEAST_SHM_BYTES = 100 << 20


def locked_memory_verdicts(limits: LimitsReport | None, *, has_cards: bool, context: Context) -> Iterator[ProbeVerdict]:
    """Judges how much memory ranks may lock: cards for RDMA need it, CUDA's own pinning does not.

    Args:
        limits: resource limits of a process like the ranks; None where they are not known.
        has_cards: whether the host has a card for RDMA that works, and that programs there can open.
        context: the jobs; one whose ranks do not take RDMA runs all the same.
    """
    locked = None if limits is None else limits.lockable_bytes
    if limits is None or not has_cards or locked is None or locked >= _LITTLE_LOCKED_BYTES:
        return
    fix = "`* - memlock unlimited` in /etc/security/limits.conf"
    hard = limits.memlock_hard_bytes
    if context.is_here and (hard is None or hard >= _LITTLE_LOCKED_BYTES):
        fix = f"`ulimit -l {'unlimited' if hard is None else hard >> 10}` for one shell, {fix} for good"
    else:
        fix += ", until a new login's `ulimit -l` says unlimited"
    fix += "; in Slurm `PropagateResourceLimitsExcept=MEMLOCK`, of a service `LimitMEMLOCK=infinity`"
    yield ProbeVerdict(
        level="red" if context.takes_rdma else "amber",
        text=f"{format_bytes(locked)} may be locked: RDMA fails with so little",
        fix=f"{fix}, of a container `--ulimit memlock=-1`",
        path="host.limits.memlock_bytes",
    )


def open_files_verdicts(limits: LimitsReport | None) -> Iterator[ProbeVerdict]:
    """Judges how many files a rank may have open.

    Args:
        limits: resource limits of a process like the ranks; None where they are not known.
    """
    if limits is None or limits.nofile is None or limits.nofile >= _FEW_FILES:
        return
    fix = f"`* - nofile {_MANY_FILES}` in /etc/security/limits.conf there"
    if limits.nofile_hard is None or limits.nofile_hard >= _FEW_FILES:
        fix += f"; for one shell `ulimit -n {min(limits.nofile_hard or _MANY_FILES, _MANY_FILES)}`"
    else:
        fix += f", or `docker run --ulimit nofile={_MANY_FILES}`"
    yield ProbeVerdict(
        level="amber",
        text=f"{limits.nofile} open files, few for many ranks and data loaders",
        fix=fix,
        path="host.limits.nofile",
    )


def process_verdicts(limits: LimitsReport | None) -> Iterator[ProbeVerdict]:
    """Judges how many processes and threads the user may have.

    Args:
        limits: resource limits of a process like the ranks; None where they are not known.
    """
    if limits is not None and limits.nproc is not None and limits.nproc < FEW_PROCESSES:
        text = f"nproc {limits.nproc}: threads of ranks and data loaders may fail to start"
        yield ProbeVerdict(level="amber", text=text, fix="`ulimit -u unlimited`", path="host.limits.nproc")


def shared_memory_verdicts(memory: MemoryReport) -> Iterator[ProbeVerdict]:
    """Judges /dev/shm, by which data loaders and the ranks of one host exchange tensors.

    Args:
        memory: memory of the host, of which /dev/shm is judged.
    """
    size, free = memory.shm_total_bytes, memory.shm_free_bytes
    if size is None:
        text = "/dev/shm is not there; ranks and data loaders exchange tensors by it"
        fix = "`mount -t tmpfs tmpfs /dev/shm`, or start the container with `--shm-size=8g`"
        yield ProbeVerdict(level="red", text=text, fix=fix, path="memory.shm_total_bytes")
    elif size < _SMALL_SHM_BYTES:
        text = f"/dev/shm of {format_bytes(size)}, small for data loaders"
        fix = "`docker run --shm-size=8g`, or `mount -o remount,size=8G /dev/shm`"
        yield ProbeVerdict(level="amber", text=text, fix=fix, path="memory.shm_total_bytes")
    elif free is not None and free < _LEAST_SHM_BYTES:
        fix = "`ls -l /dev/shm` shows what dead programs left"
        yield ProbeVerdict(level="amber", text="/dev/shm is full", fix=fix, path="memory.shm_free_bytes")
