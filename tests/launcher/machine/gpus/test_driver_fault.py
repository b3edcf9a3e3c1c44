"""Which machines stop a job for their driver, and which go on without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dsrun.host.gpu_presence import NvidiaPresence
from dsrun.launcher.machine.gpus.driver_fault import (
    DriverFault,
    fault_at_start,
    fault_of_all,
    fault_of_none,
    idle_text,
)

WORDS = "Driver's words"


def seen(**values: Any) -> NvidiaPresence:
    """A machine; `gpus` files in /dev, all open."""
    gpus = tuple(f"/dev/nvidia{number}" for number in range(values.pop("gpus", 0)))
    known: dict[str, Any] = {
        "cards": {},
        "files": gpus,
        "open_files": gpus,
        "closed_by_rights": False,
        "kernel_module": None,
        "in_wsl": False,
        "has_own_dev": False,
    }
    return NvidiaPresence(**{**known, **values})


def cards(*drivers: str | None) -> dict[str, str | None]:
    return {f"0000:{number:02x}:00.0": driver for number, driver in enumerate(drivers)}


NODES = ("/dev/nvidia0", "/dev/nvidia1")
#: What goes on without a GPU: NVML's error at the start, the machine, and what a job is told.
NO_FAULT = {
    "nothing of NVIDIA's": ("LibraryNotFound", seen(), None),
    "an image with the library on a machine without GPUs": ("DriverNotLoaded", seen(has_own_dev=True), None),
    "a container without --gpus": (
        "LibraryNotFound",
        seen(cards=cards("nvidia", "nvidia"), kernel_module="580.95", has_own_dev=True),
        r"the host has 2 NVIDIA GPUs, and this container was given none \(`--gpus all`.*",
    ),
    "the same with the library in its image": (
        "DriverNotLoaded",
        seen(cards=cards("nvidia"), kernel_module="580.95", has_own_dev=True),
        r"the host has an NVIDIA GPU, and this container was given none .*",
    ),
    "the same with another version of it": (
        "Unknown",
        seen(cards=cards("nvidia"), kernel_module="580.95", has_own_dev=True),
        "the host has an NVIDIA GPU, .*",
    ),
    "a job without --gres, which may not open nvidiactl either": (
        "NoPermission",
        seen(files=NODES, open_files=(), kernel_module="580.95", cards=cards("nvidia", "nvidia")),
        "this machine has 2 NVIDIA GPUs, and the scheduler or the container forbids this process to open any",
    ),
    "the same after an update of the driver": (
        "LibRmVersionMismatch",
        seen(files=NODES, open_files=(), kernel_module="580.95"),
        "this machine has 2 NVIDIA GPUs, and the scheduler .*",
    ),
    "an apptainer without --nv in a job without --gres": (
        "LibraryNotFound",
        seen(files=NODES, open_files=(), kernel_module="580.95"),
        "this machine has 2 NVIDIA GPUs, and the scheduler .*",
    ),
    "nouveau, and no driver of NVIDIA's": (
        "LibraryNotFound",
        seen(cards=cards("nouveau")),
        "this machine has an NVIDIA GPU under nouveau, and NVIDIA's driver is not installed",
    ),
    "no driver at all": ("LibraryNotFound", seen(cards=cards(None)), ".* under no kernel driver, and .*"),
    "GPUs for virtual machines": (
        "DriverNotLoaded",
        seen(cards=cards("vfio-pci", "vfio-pci")),
        "this machine has 2 NVIDIA GPUs under vfio-pci, which keeps them for virtual machines",
    ),
    "a GPU that a virtual machine has for now": (
        "DriverNotLoaded",
        seen(gpus=1, cards=cards("vfio-pci")),
        "this machine has an NVIDIA GPU under vfio-pci, which keeps it for virtual machines",
    ),
    "the package is missing without a GPU": ("", seen(), None),
    "the package is missing and no GPU was given": ("", seen(files=NODES, open_files=()), ".* forbids .*"),
}
#: What stops a job: NVML's error at the start, the machine, the reason and the way out.
FAULT = {
    "an updated driver": (
        "LibRmVersionMismatch",
        seen(gpus=8, kernel_module="580.95"),
        f"{WORDS}: the driver was updated, and the old kernel module 580.95 is still loaded",
        "reboot",
    ),
    "a daemon-reload on the host": (
        "Unknown",
        seen(files=NODES, open_files=(), has_own_dev=True),
        f"{WORDS}: this container may not open /dev/nvidia0 any more",
        "systemctl daemon-reload",
    ),
    "a container that may open them": (
        "Unknown",
        seen(gpus=2, has_own_dev=True),
        f"{WORDS}: the driver does not answer in this container",
        "start the container anew",
    ),
    "a group of users with GPUs": (
        "NoPermission",
        seen(files=NODES, open_files=(), closed_by_rights=True),
        f"{WORDS}: this process may not open /dev/nvidia0",
        "ls -l /dev/nvidia0",
    ),
    "a container with compute alone": (
        "LibraryNotFound",
        seen(gpus=2, has_own_dev=True),
        "libnvidia-ml.so.1, the driver's library, is not found in this container, which was given GPUs",
        "`--gpus all`, and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    "an apptainer without --nv": (
        "LibraryNotFound",
        seen(gpus=2, kernel_module="580.95"),
        "libnvidia-ml.so.1, the driver's library, is not found, and the GPUs are there",
        "`--nv`",
    ),
    "a driver without its library": (
        "LibraryNotFound",
        seen(cards=cards("nvidia"), kernel_module="580.95"),
        "libnvidia-ml.so.1, the driver's library, is not found, and the GPUs are there",
        "libraries of driver 580.95",
    ),
    "WSL without the path": (
        "LibraryNotFound",
        seen(in_wsl=True),
        "libnvidia-ml.so.1, the driver's library, is not found, and WSL has it in /usr/lib/wsl/lib",
        "LD_LIBRARY_PATH=/usr/lib/wsl/lib",
    ),
    "WSL with a stopped driver": (
        "DriverNotLoaded",
        seen(in_wsl=True),
        "NVIDIA's driver of Windows does not answer in WSL",
        "wsl --shutdown",
    ),
    "an updated kernel": (
        "DriverNotLoaded",
        seen(cards=cards(None, "vfio-pci")),
        "NVIDIA's kernel module is not loaded",
        "dkms status",
    ),
    "nouveau in place of the driver": (
        "DriverNotLoaded",
        seen(cards=cards("nouveau")),
        "the kernel driver nouveau has the GPU, in place of NVIDIA's",
        "reboot after",
    ),
    "files that nobody made": (
        "DriverNotLoaded",
        seen(cards=cards("nvidia"), kernel_module="580.95"),
        "the NVIDIA driver is loaded, and its device files are not there",
        "nvidia-modprobe",
    ),
    "another error": ("IrqIssue", seen(gpus=1), f"the NVIDIA driver does not answer: {WORDS}", "dmesg"),
    "a missing package": (
        "",
        seen(gpus=1),
        "dsrun cannot ask the driver: the package nvidia-ml-py is not installed",
        "pip install nvidia-ml-py",
    ),
}


@pytest.mark.parametrize("name", NO_FAULT)
def test_a_machine_that_gives_no_gpu_stops_nobody(name: str) -> None:
    error, machine, told = NO_FAULT[name]
    assert fault_at_start(error, WORDS, machine) is None
    text = idle_text(machine)
    assert text is None if told is None else re.fullmatch(told, text or "")


@pytest.mark.parametrize("name", FAULT)
def test_a_gpu_that_was_given_and_does_not_answer_is_a_fault(name: str) -> None:
    error, machine, reason, way_out = FAULT[name]
    fault = fault_at_start(error, WORDS, machine)
    assert fault is not None
    assert fault.reason == reason
    assert way_out in fault.way_out


def test_a_driver_that_lists_none_is_a_fault_where_one_was_given() -> None:
    found = fault_of_none(seen(gpus=8))
    assert found is not None
    assert found.reason == "the NVIDIA driver runs and does not find any of 8 GPUs"
    assert fault_of_none(seen(cards=cards("nvidia"), kernel_module="580.95")) is not None


@pytest.mark.parametrize(
    "machine",
    [
        seen(),
        seen(files=NODES, open_files=(), kernel_module="580.95"),
        seen(cards=cards("nvidia"), kernel_module="580.95", has_own_dev=True),
        seen(cards=cards("vfio-pci"), kernel_module="580.95"),
    ],
)
def test_a_driver_that_lists_none_stops_nobody_where_none_was_given(machine: NvidiaPresence) -> None:
    assert fault_of_none(machine) is None


def test_gpus_that_are_all_left_out_are_a_fault_unless_a_job_asked_for_none() -> None:
    lost = fault_of_all(["GPU is lost", "GPU is lost"], seen(gpus=2), forbidden=False)
    assert lost is not None
    assert lost.reason == "the NVIDIA driver does not reach any of 2 GPUs: GPU is lost"
    closed = seen(files=NODES, open_files=())
    assert fault_of_all(["Insufficient Permissions"] * 2, closed, forbidden=True) is None
    by_rights = fault_of_all(
        ["Insufficient Permissions"], seen(files=NODES, open_files=(), closed_by_rights=True), forbidden=True
    )
    assert by_rights == DriverFault(
        reason="Insufficient Permissions: this process may not open /dev/nvidia0",
        way_out="`ls -l /dev/nvidia0` shows the group that may; as one of a scheduler's jobs, ask it for GPUs",
    )
