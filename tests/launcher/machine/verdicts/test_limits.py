"""Limits that stop jobs, or make them suffer, are told with every way to raise them; the job decides how bad it is."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.launcher.machine.limits import LimitsReport
from dsrun.launcher.machine.memory import MemoryReport
from dsrun.launcher.machine.verdict import Context, ProbeVerdict
from dsrun.launcher.machine.verdicts.limits import (
    locked_memory_verdicts,
    open_files_verdicts,
    process_verdicts,
    shared_memory_verdicts,
)

MIB, GIB = 1 << 20, 1 << 30


def limits(**values: Any) -> LimitsReport:
    told: dict[str, Any] = {**dict.fromkeys(LimitsReport.__dataclass_fields__), "locks_without_limit": False}
    told |= values
    return LimitsReport(**told)


def shm(total: int | None, free: int | None = None) -> MemoryReport:
    told: dict[str, Any] = dict.fromkeys(MemoryReport.__dataclass_fields__)
    told |= {"shm_total_bytes": total, "shm_free_bytes": free}
    return MemoryReport(**told)


def locked(
    *, has_cards: bool = True, takes_rdma: bool = False, is_here: bool = True, **values: Any
) -> list[ProbeVerdict]:
    context = Context(takes_rdma=takes_rdma, is_here=is_here)
    return [*locked_memory_verdicts(limits(**values), has_cards=has_cards, context=context)]


@pytest.mark.parametrize(("takes_rdma", "level"), [(True, "red"), (False, "amber")])
def test_little_locked_memory_stops_ranks_that_take_rdma_and_is_told_to_the_others(
    takes_rdma: bool, level: str
) -> None:
    (found,) = locked(memlock_bytes=8 * MIB, takes_rdma=takes_rdma)
    assert (found.level, found.text) == (level, "8.0 MiB may be locked: RDMA fails with so little")
    assert found.path == "host.limits.memlock_bytes"


@pytest.mark.parametrize(
    ("hard", "is_here", "first"),
    [
        (
            None,
            True,
            "`ulimit -l unlimited` for one shell, `* - memlock unlimited` in /etc/security/limits.conf for good; ",
        ),
        (
            64 * MIB,
            True,
            "`ulimit -l 65536` for one shell, `* - memlock unlimited` in /etc/security/limits.conf for good",
        ),
        # What a shell here may do is nothing to ranks that another host starts.
        (
            None,
            False,
            "`* - memlock unlimited` in /etc/security/limits.conf, until a new login's `ulimit -l` says unli",
        ),
        (
            8 * MIB,
            True,
            "`* - memlock unlimited` in /etc/security/limits.conf, until a new login's `ulimit -l` says unli",
        ),
    ],
)
def test_locked_memory_is_told_with_every_way_to_more_of_it(hard: int | None, is_here: bool, first: str) -> None:
    (found,) = locked(memlock_bytes=8 * MIB, memlock_hard_bytes=hard, is_here=is_here)
    assert found.fix.startswith(first)
    for way in ("`PropagateResourceLimitsExcept=MEMLOCK`", "`LimitMEMLOCK=infinity`", "`--ulimit memlock=-1`"):
        assert way in found.fix


@pytest.mark.parametrize(
    "values",
    [
        {"memlock_bytes": 64 * MIB},
        {"memlock_bytes": None},
        {"memlock_bytes": 8 * MIB, "has_cards": False},
        {"memlock_bytes": 8 * MIB, "locks_without_limit": True},
    ],
)
def test_who_may_lock_enough_or_has_no_card_is_told_nothing(values: dict[str, Any]) -> None:
    assert locked(takes_rdma=True, **values) == []


@pytest.mark.parametrize(
    ("hard", "fix"),
    [
        (None, "; for one shell `ulimit -n 65536`"),
        (524288, "; for one shell `ulimit -n 65536`"),
        (8192, "; for one shell `ulimit -n 8192`"),
        (1024, ", or `docker run --ulimit nofile=65536`"),
    ],
)
def test_few_open_files_are_told_with_what_this_user_may_do(hard: int | None, fix: str) -> None:
    (found,) = open_files_verdicts(limits(nofile=1024, nofile_hard=hard))
    assert (found.level, found.text) == ("amber", "1024 open files, few for many ranks and data loaders")
    assert found.fix == f"`* - nofile 65536` in /etc/security/limits.conf there{fix}"


def test_few_processes_are_told() -> None:
    (found,) = process_verdicts(limits(nproc=4095))
    assert (found.level, found.path) == ("amber", "host.limits.nproc")
    assert [*process_verdicts(limits(nproc=4096)), *process_verdicts(limits(nproc=None))] == []


def test_enough_open_files_and_limits_that_nobody_tells_are_not_spoken_of() -> None:
    assert [*open_files_verdicts(limits(nofile=4096)), *open_files_verdicts(limits(nofile=None))] == []
    nothing = [
        *open_files_verdicts(None),
        *process_verdicts(None),
        *locked_memory_verdicts(None, has_cards=True, context=Context(takes_rdma=True)),
    ]
    assert nothing == []


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (shm(None), "red memory.shm_total_bytes: /dev/shm is not there; ranks and data loaders exchange tensors by it"),
        (shm(64 * MIB), "amber memory.shm_total_bytes: /dev/shm of 64.0 MiB, small for data loaders"),
        (shm(8 * GIB, 99 * MIB), "amber memory.shm_free_bytes: /dev/shm is full"),
    ],
)
def test_shared_memory_that_is_missing_small_or_full_is_told(memory: MemoryReport, said: str) -> None:
    (found,) = shared_memory_verdicts(memory)
    assert f"{found.level} {found.path}: {found.text}" == said
    assert found.fix


@pytest.mark.parametrize("memory", [shm(GIB), shm(GIB, 100 * MIB)])
def test_enough_shared_memory_is_not_spoken_of(memory: MemoryReport) -> None:
    assert list(shared_memory_verdicts(memory)) == []
