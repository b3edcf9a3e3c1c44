"""Who computes on a GPU is told with whether he counts; desktops, monitors and page cache are nobody."""

from __future__ import annotations

import pytest

from dsrun.launcher.machine.gpus.users import GpuProcess, GpuUsers, read_users, running_on
from support.nvml import GIB, MIB, Part, made_up_nvml


def users(part: Part, *, desktop_most_bytes: int = 0) -> GpuUsers:
    nvml = made_up_nvml(part)()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return read_users(
        nvml,
        handle,
        used_bytes=memory.total - memory.free,
        desktop_most_bytes=desktop_most_bytes,
        user_of={4242: "bob"}.get,
    )


@pytest.mark.parametrize(
    ("memory_bytes", "is_desktop", "counts"),
    [
        (9 * GIB, False, True),
        (100 * MIB + 1, False, True),
        (None, False, True),
        (100 * MIB, False, False),
        (GIB, True, False),
    ],
)
def test_monitors_and_desktops_do_not_count_and_unknown_memory_does(
    memory_bytes: int | None, is_desktop: bool, counts: bool
) -> None:
    process = GpuProcess(pid=1, user="bob", memory_bytes=memory_bytes, is_desktop=is_desktop)
    assert process.counts is counts


def test_processes_are_named_with_their_users_where_they_can_be_told() -> None:
    found = users(Part("GPU-0", processes=[(4242, 9 * GIB)], mps=[(7, GIB)], used_bytes=10 * GIB))
    assert [one.label for one in found.processes or ()] == ["pid 4242 of user bob", "pid 7"]
    assert (found.desktop_bytes, found.unseen_bytes) == (0, 0)


def test_who_draws_and_computes_is_a_desktop_up_to_its_part() -> None:
    browser, simulator = (12, 700 * MIB), (4242, 20 * GIB)
    found = users(Part("GPU-0", graphics=[browser, simulator], processes=[browser, simulator], used_bytes=22 * GIB))
    assert [(one.pid, one.is_desktop) for one in found.processes or ()] == [(12, True), (4242, False)]
    assert found.desktop_bytes == 700 * MIB


@pytest.mark.parametrize(("most", "desktop", "unseen"), [(0, 0, 37), (36, 0, 37), (40, 37, 0)])
def test_memory_that_nobody_listed_has_is_a_desktops_up_to_a_bound(most: int, desktop: int, unseen: int) -> None:
    found = users(Part("GPU-0", used_bytes=37 * GIB), desktop_most_bytes=most * GIB)
    assert (found.desktop_bytes, found.unseen_bytes) == (desktop * GIB, unseen * GIB)


@pytest.mark.parametrize(
    "part",
    [
        Part("GPU-0", used_bytes=2 * GIB),
        Part("GPU-0", processes=[(7, None)], used_bytes=70 * GIB),
        Part("GPU-0", used_bytes=70 * GIB, numa_node=1),
    ],
)
def test_memory_that_may_be_a_listed_process_or_the_kernels_is_nobody_elses(part: Part) -> None:
    assert users(part).unseen_bytes == 0


def test_a_driver_that_shows_no_process_is_not_one_without_any() -> None:
    nvml = made_up_nvml(Part("GPU-0"))()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert running_on(nvml, handle) == {}
    del nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetMPSComputeRunningProcesses
    assert running_on(nvml, handle) is None


def test_clients_of_mps_alone_do_not_say_that_nobody_else_computes() -> None:
    nvml = made_up_nvml(Part("GPU-0"))()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    del nvml.nvmlDeviceGetComputeRunningProcesses
    assert running_on(nvml, handle) is None
    nvml = made_up_nvml(Part("GPU-0", mps=[(7, GIB)]))()
    del nvml.nvmlDeviceGetComputeRunningProcesses
    assert running_on(nvml, nvml.nvmlDeviceGetHandleByIndex(0)) == {7: GIB}
