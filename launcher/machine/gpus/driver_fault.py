"""Tells a driver that fails from a machine without GPUs: NVML's answer held to what the kernel shows. Pure.

A job must not train on the CPU because a driver is broken, and must not be refused because the host of its container
has GPUs that it was not given. See [Note: given] of gpu_presence. What is a fault, and what is not: decision 45.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dsrun.host.gpu_presence import NvidiaPresence

_ASK_KERNEL = "`nvidia-smi` and `dmesg | grep NVRM` say more; a reboot mends most"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFault:
    """Why GPUs that a job was given cannot be used.

    Attributes:
        reason: cause of the fault, in words that can end a sentence.
        way_out: advice on how to mend the fault.
    """

    reason: str
    way_out: str


def fault_at_start(error: str, words: str, presence: NvidiaPresence) -> DriverFault | None:
    """Judges a driver that did not start.

    Args:
        error: end of the name that the NVML error has in `pynvml`, as `LibRmVersionMismatch`; empty where the package
            is not installed.
        words: the driver's own for it.
        presence: signs of NVIDIA GPUs that the kernel shows: cards, device files, kernel module.

    Returns:
        the fault; None where there is no GPU, or none that this process was given.
    """
    if not error:
        if not presence.is_given:
            return None
        return DriverFault(
            reason="dsrun cannot ask the driver: the package nvidia-ml-py is not installed",
            way_out="`pip install nvidia-ml-py`",
        )
    if error == "LibraryNotFound":
        return _without_library(presence)
    if error == "DriverNotLoaded":
        return _not_loaded(presence)
    if presence.has_own_dev and not presence.files and not presence.in_wsl:
        return None
    if error in ("LibRmVersionMismatch", "NoPermission") and _is_forbidden(presence):
        return None
    if error == "LibRmVersionMismatch":
        loaded = "" if presence.kernel_module is None else f" {presence.kernel_module}"
        return DriverFault(
            reason=f"{words}: the driver was updated, and the old kernel module{loaded} is still loaded",
            way_out="reboot this machine; if only its host was updated, start the container anew",
        )
    if error == "NoPermission" or (presence.files and not presence.open_files):
        return _closed(words, presence)
    if error == "Unknown" and presence.has_own_dev:
        return DriverFault(
            reason=f"{words}: the driver does not answer in this container",
            way_out="start the container anew: a `systemctl daemon-reload` on the host takes GPUs from those that run",
        )
    return DriverFault(reason=f"the NVIDIA driver does not answer: {words}", way_out=_ASK_KERNEL)


def fault_of_none(presence: NvidiaPresence) -> DriverFault | None:
    """Judges a driver that runs and lists no GPU; None where there is none that this process was given."""
    if presence.is_given:
        count = max(len(presence.open_files), 1)
        what = "GPU" if count == 1 else f"any of {count} GPUs"
        return DriverFault(reason=f"the NVIDIA driver runs and does not find {what}", way_out=_ASK_KERNEL)
    if presence.files or presence.has_own_dev:
        return None
    if not [driver for driver in presence.cards.values() if driver == "nvidia"]:
        return None
    return DriverFault(reason="the NVIDIA driver runs and does not find its GPUs", way_out=_ASK_KERNEL)


def fault_of_all(reasons: Collection[str], presence: NvidiaPresence, *, forbidden: bool) -> DriverFault | None:
    """Judges a driver that lists GPUs of which none can be used; None where this process was given none.

    Args:
        reasons: the driver's words, for each GPU.
        presence: signs of NVIDIA GPUs that the kernel shows: cards, device files, kernel module.
        forbidden: whether this process may open none of the GPUs.
    """
    words = ", ".join(dict.fromkeys(reasons))
    if forbidden:
        return None if _is_forbidden(presence) else _closed(words, presence)
    gpus = "the GPU" if len(reasons) == 1 else f"any of {len(reasons)} GPUs"
    return DriverFault(reason=f"the NVIDIA driver does not reach {gpus}: {words}", way_out=_ASK_KERNEL)


def fault_of_choice(visible: str | None, count: int, *, are_cut: bool) -> DriverFault:
    """Judges GPUs that the driver serves, of which a job would have none: CUDA says that there is no device.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        count: GPUs that the job could see.
        are_cut: those that it names are in MIG mode without slices.
    """
    if are_cut:
        return DriverFault(
            reason="MIG mode is on, and there are no slices",
            way_out="`sudo nvidia-smi mig -cgi PROFILE -C` makes one, `sudo nvidia-smi -mig 0` ends the mode",
        )
    there = "GPU 0 only" if count == 1 else f"GPUs 0 to {count - 1}"
    return DriverFault(
        reason=f"CUDA_VISIBLE_DEVICES is `{(visible or '')[:200]}` and names none of them; this process sees {there}",
        way_out="name others, each once, or unset it; `nvidia-smi -L` lists GPUs and their slices",
    )


def idle_text(presence: NvidiaPresence) -> str | None:
    """Returns what to say of NVIDIA GPUs that the machine has and this process was not given; None without any."""
    count = presence.count
    if not count or presence.is_given:
        return None
    gpus = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
    if presence.is_passed_on and not presence.has_own_dev:
        under = ", ".join(sorted({driver or "" for driver in presence.cards.values()}))
        return (
            f"this machine has {gpus} under {under}, which keeps {'it' if count == 1 else 'them'} for virtual machines"
        )
    if presence.files:
        return f"this machine has {gpus}, and the scheduler or the container forbids this process to open any"
    if presence.has_own_dev:
        return f"the host has {gpus}, and this container was given none (`--gpus all`, `nvidia.com/gpu`)"
    drivers = sorted({driver or "no kernel driver" for driver in presence.cards.values()})
    return f"this machine has {gpus} under {', '.join(drivers)}, and NVIDIA's driver is not installed"


def _without_library(presence: NvidiaPresence) -> DriverFault | None:
    reason = "libnvidia-ml.so.1, the driver's library, is not found"
    if presence.open_files and presence.has_own_dev:
        return DriverFault(
            reason=f"{reason} in this container, which was given GPUs",
            way_out="start it with `--gpus all`, and NVIDIA_DRIVER_CAPABILITIES=compute,utility (or all)",
        )
    if presence.open_files or (presence.kernel_module is not None and not presence.files and not presence.has_own_dev):
        loaded = presence.kernel_module or "that is loaded"
        return DriverFault(
            reason=f"{reason}, and the GPUs are there",
            way_out="a container of apptainer wants `--nv`, of distrobox `--nvidia`, of enroot "
            f"NVIDIA_VISIBLE_DEVICES=all; else install the libraries of driver {loaded}, or add their folder to "
            "LD_LIBRARY_PATH",
        )
    if presence.in_wsl:
        return DriverFault(
            reason=f"{reason}, and WSL has it in /usr/lib/wsl/lib",
            way_out="`export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH`",
        )
    return None


def _not_loaded(presence: NvidiaPresence) -> DriverFault | None:
    """Judges a library without its kernel module: a driver was installed here, or a container's image has one."""
    if presence.in_wsl:
        return DriverFault(
            reason="NVIDIA's driver of Windows does not answer in WSL",
            way_out="`wsl --update` and `wsl --shutdown` in Windows, then start WSL anew",
        )
    if presence.is_given:
        return DriverFault(reason="NVIDIA's kernel module is not loaded", way_out="`sudo modprobe nvidia`")
    if presence.files or presence.has_own_dev or presence.is_passed_on or not presence.cards:
        return None
    drivers = presence.cards.values()
    if "nvidia" in drivers:
        return DriverFault(
            reason="the NVIDIA driver is loaded, and its device files are not there",
            way_out="`sudo nvidia-modprobe -c 0 -u`, or `sudo nvidia-smi` once after each boot",
        )
    if "nouveau" in drivers:
        return DriverFault(
            reason="the kernel driver nouveau has the GPU, in place of NVIDIA's",
            way_out="reboot after the installation of NVIDIA's driver; it must keep nouveau from being loaded",
        )
    return DriverFault(
        reason="NVIDIA's kernel module is not loaded",
        way_out="`sudo modprobe nvidia` says why; after an update of the kernel the driver must be built for it "
        "(`dkms status`), and Secure Boot takes signed modules only",
    )


def _is_forbidden(presence: NvidiaPresence) -> bool:
    """Whether the device cgroup of a scheduler's job keeps all GPUs from it: it asked for none."""
    closed = bool(presence.files) and not presence.open_files and not presence.closed_by_rights
    return closed and not presence.has_own_dev


def _closed(words: str, presence: NvidiaPresence) -> DriverFault:
    name = presence.files[0] if presence.files else "/dev/nvidiactl"
    if presence.has_own_dev:
        return DriverFault(
            reason=f"{words}: this container may not open {name} any more",
            way_out="start the container anew: a `systemctl daemon-reload` on the host takes GPUs from those that run",
        )
    return DriverFault(
        reason=f"{words}: this process may not open {name}",
        way_out=f"`ls -l {name}` shows the group that may; as one of a scheduler's jobs, ask it for GPUs",
    )
