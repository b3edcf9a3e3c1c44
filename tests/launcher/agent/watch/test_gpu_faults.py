"""After a rank died of its GPU the driver is asked once: which card it was, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsrun.launcher.agent.watch.gpu_faults import find_faults
from dsrun.launcher.machine.devices.by_rank import find_gpus
from dsrun.launcher.protocol import GpuFinding
from support.machines import Machine, recorded_machine
from support.nvml import ERRORS
from support.topologies import write_tree

GIB = 1 << 30


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A workstation of four GPUs; its tree is only read."""
    return recorded_machine("workstation", tmp_path_factory.mktemp("machine"))


def ranks_of(machine: Machine) -> list[GpuFinding]:
    """A rank on each GPU but the last."""
    places = find_gpus(machine.root, may_open=lambda path: True)[:-1]
    return [GpuFinding(uuid=gpu.uuid, address=gpu.address, ranks=[rank]) for rank, gpu in enumerate(places)]


def faults_of(
    machine: Machine, calls: Mapping[str, Any] | None = None, *, root: Path | None = None
) -> dict[int, GpuFinding]:
    """Returns what is found, by rank; -1 for a GPU of none. `calls` replace the driver's."""

    def load() -> Any:
        nvml = machine.load_nvml()
        return SimpleNamespace(**{**vars(nvml), **(calls or {})})

    found = find_faults(
        root or machine.root,
        ranks_of(machine),
        is_of_job=lambda pid: pid < 1000,
        user_of=lambda pid: "bob",
        load_nvml=load,
    )
    return {gpu.ranks[0] if gpu.ranks else -1: gpu for gpu in found}


def test_gpus_that_are_well_are_named_for_their_ranks_alone(machine: Machine) -> None:
    found = faults_of(machine)
    assert sorted(found) == [0, 1, 2]
    given = ranks_of(machine)[2]
    assert found[2] == GpuFinding(index=2, uuid=given.uuid, address=given.address, ranks=[2])


def test_a_lost_gpu_is_named_by_the_address_that_the_kernel_still_shows(machine: Machine) -> None:
    at = machine.load_nvml().nvmlDeviceGetHandleByIndex

    def lost(index: int) -> Any:
        if index == 1:
            raise ERRORS["GpuIsLost"]
        return at(index)

    found = faults_of(machine, {"nvmlDeviceGetHandleByIndex": lost})
    given = ranks_of(machine)[1]
    assert (found[1].uuid, found[1].address) == (given.uuid, given.address)
    assert found[1].faults == ["the driver does not reach it: GPU is lost"]
    assert found[0].faults == []


def test_a_gpu_that_the_driver_dropped_is_told(machine: Machine) -> None:
    found = faults_of(machine, {"nvmlDeviceGetCount": lambda: 2})
    assert found[2].faults == ["the driver does not show it any more"]


def test_a_driver_that_fails_is_told_of_every_gpu_of_the_job(machine: Machine) -> None:
    def fail() -> None:
        raise ERRORS["Unknown"]

    found = faults_of(machine, {"nvmlInit": fail})
    assert sorted(found) == [0, 1, 2]
    assert all(gpu.faults[0].startswith("the driver does not answer: ") for gpu in found.values())


def recovery(action: int) -> Callable[..., list[Any]]:
    value = SimpleNamespace(fieldId=230, nvmlReturn=0, value=SimpleNamespace(ullVal=action))

    def ask(_handle: Any, fields: Sequence[int]) -> list[Any]:
        return [value] if list(fields) == [230] else []

    return ask


def always(answer: Any) -> Callable[[Any], Any]:
    def ask(_handle: Any) -> Any:
        return answer

    return ask


@pytest.mark.parametrize(
    ("name", "call", "fault"),
    [
        ("nvmlDeviceGetFieldValues", recovery(1), "the driver asks to reset the GPU"),
        ("nvmlDeviceGetFieldValues", recovery(2), "the driver asks to reboot the node"),
        ("nvmlDeviceGetRemappedRows", always((0, 1, 1, 0)), "waits for a reset to be replaced"),
        ("nvmlDeviceGetRemappedRows", always((0, 1, 0, 1)), "the card is to be exchanged"),
        (
            "nvmlDeviceGetComputeRunningProcesses",
            always([SimpleNamespace(pid=4242, usedGpuMemory=40 * GIB), SimpleNamespace(pid=7, usedGpuMemory=1)]),
            "pid 4242 of user bob holds 40.0 GiB of it",
        ),
    ],
)
def test_what_the_driver_knows_is_told(machine: Machine, name: str, call: Callable[..., Any], fault: str) -> None:
    found = faults_of(machine, {name: call})
    assert len(found[1].faults) == 1
    assert fault in found[1].faults[0]
    # Another GPU of the host with a fault may be the root, as ranks talk to each other; what others do there is theirs.
    assert (-1 in found) == ("holds" not in fault)


def test_a_desktop_that_has_memory_of_a_ranks_gpu_is_named(machine: Machine) -> None:
    browser = [SimpleNamespace(pid=4242, usedGpuMemory=GIB)]
    calls = {
        "nvmlDeviceGetComputeRunningProcesses": always(browser),
        "nvmlDeviceGetGraphicsRunningProcesses": always(browser),
    }
    assert faults_of(machine, calls)[1].faults == ["pid 4242 of user bob holds 1.0 GiB of it"]


def test_an_answer_of_none_is_no_fault(machine: Machine) -> None:
    assert faults_of(machine, {"nvmlDeviceGetFieldValues": recovery(0)})[0].faults == []


def test_errors_of_the_last_minutes_are_told_and_older_ones_are_not(machine: Machine, tmp_path: Path) -> None:
    addresses = [(gpu.address or "").removesuffix(".0") for gpu in ranks_of(machine)]
    log = (
        f"4,10,100000000,-;NVRM: Xid (PCI:{addresses[0]}): 31, pid=1, name=python, MMU Fault\n"
        f"4,11,9990000000,-;NVRM: Xid (PCI:{addresses[1]}): 79, pid=2, GPU has fallen off the bus.\n"
    )
    write_tree(tmp_path, {"dev/kmsg": log, "proc/uptime": "10000.00 1.00\n"})
    found = faults_of(machine, root=tmp_path)
    assert found[0].faults == []
    assert found[1].faults == ["Xid 79 (pid=2, GPU has fallen off the bus.)"]
