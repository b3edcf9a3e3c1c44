"""Which GPUs of this machine a job takes: free ones first. The driver is read here, leases are an argument.

A device is a GPU, or a MIG slice. It is *free* if no lease is on it and no process computes there: dsrun's own jobs are
known by their leases before they use the GPU, everybody else by NVML. The processes that started this one do not count:
a notebook that calls dsrun has made room for it, or else has to know. Seen on made-up driver answers only: busy
GPUs of other users, MIG, and containers were not at hand. Who counts as a user of one: [Note: users of a GPU].

[Note: MIG] CUDA shows a process one slice only, as `cuda:0`. So with slices each rank gets a CUDA_VISIBLE_DEVICES of
its own, and LOCAL_RANK stays the rank's number on the host, for it names its heartbeat, cores and error file: a script
that runs on slices takes `cuda:0`, not `cuda:LOCAL_RANK`. NCCL refuses two ranks on one GPU, slices or not
(github.com/NVIDIA/nccl/issues/1716), so ranks that talk need gloo.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError

from ..gpus.mig import slice_handles
from ..gpus.nvml import NoDriver, ask_driver, open_nvml, text_of
from ..gpus.read import gpu_handle
from ..gpus.users import read_users
from ..gpus.visible import listed_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or MIG slice that the job may see.

    Attributes:
        name: UUID, which is what CUDA_VISIBLE_DEVICES and the lease are called; the index where there is none.
        label: name of the device for people, `GPU 0` for example.
        is_slice: a MIG slice.
        gpu: the driver's number of the GPU that it is, or is a slice of; None where that is unknown.
        used_by: processes that compute on the device, in words: `pid 4242 of user bob`; empty if there are none.
        used_bytes: memory in use.
        desktop_bytes: part of `used_bytes` that a desktop has, in bytes; a desktop does not count as a user.
        may_be_renumbered: the driver counts GPUs that this process cannot reach, and CUDA may count them otherwise.
    """

    name: str
    label: str
    is_slice: bool = False
    gpu: int | None = None
    used_by: tuple[str, ...] = ()
    used_bytes: int = 0
    desktop_bytes: int = 0
    may_be_renumbered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job wants of this machine.

    Attributes:
        ranks: ranks it starts here.
        gpus: devices it needs; 0 for a job on the CPU, which takes a slot (a core) for each rank instead.
        chosen: these devices and no others, in the order of the local ranks: places in what `read_devices` returns;
            None leaves the choice to what is free.
    """

    ranks: int
    gpus: int
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLease:
    """What a job got.

    Attributes:
        cuda_visible_devices: value of CUDA_VISIBLE_DEVICES for all ranks on this machine; None leaves the variable as
            it is.
        slices: MIG slice of each local rank instead, see [Note: MIG]; empty without MIG.
        labels: names of the held devices, for people and the job's record; empty if nothing could be held.
    """

    cuda_visible_devices: str | None = None
    slices: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def environment(self, local_rank: int) -> dict[str, str]:
        """Returns the variables by which a rank sees what it got."""
        value = self.slices[local_rank % len(self.slices)] if self.slices else self.cuda_visible_devices
        return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}


def read_devices(
    environ: Mapping[str, str],
    *,
    load_nvml: Callable[[], Any] | None = None,
    user_of: Callable[[int], str | None] | None = None,
    own: Collection[int] | None = None,
    root: Path = Path("/"),
) -> tuple[Device, ...]:
    """Asks the driver for the devices a job may see, in the order in which it sees them.

    Where CUDA_VISIBLE_DEVICES is not set, the slices of a GPU in MIG mode are devices of their own; the GPU counts as
    one only in the number of ranks that a job has without `-n`. In MIG mode without slices it is no device. A GPU that
    the driver counts and does not let this process reach is left out, and not counted, as CUDA does not.

    Args:
        environ: environment variables, of which CUDA_VISIBLE_DEVICES is read.
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.
        user_of: function that returns the user of a process by its pid, or None if that cannot be told; None means
            `user_of_process`.
        own: processes that do not count as users; this one and those that started it if None.
        root: `/`, or a made-up tree with dev.

    Raises:
        DsrunError: the driver does not answer.
    """
    known = _Known(
        user_of=user_of or user_of_process,
        own=frozenset(own_line() if own is None else own),
        in_wsl=(root / "dev/dxg").exists(),
    )
    with driver_open(load_nvml) as nvml:
        return _read(nvml, environ.get("CUDA_VISIBLE_DEVICES"), known)


@contextlib.contextmanager
def driver_open(load_nvml: Callable[[], Any] | None = None) -> Generator[Any, None, None]:
    """Keeps the driver open over several calls of `read_devices`; it may take a second to wake up each time.

    Args:
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.

    Raises:
        DsrunError: the driver does not answer.
    """
    try:
        with open_nvml(load_nvml) as nvml:
            yield nvml
    except NoDriver as error:
        raise DsrunError(
            f"GPUs: the driver cannot be asked which are free: {error}", hint="`dsrun probe` shows what it says"
        ) from error


def take_devices(
    devices: Sequence[Device], count: int, *, leased: Mapping[str, str], share: bool
) -> tuple[tuple[Device, ...], dict[str, list[str]]]:
    """Chooses devices for a job; pure.

    Args:
        devices: those the job may see.
        count: number of devices that the job needs.
        leased: name of a device -> its holder, in words.
        share: whether to take devices in use too if too few are free: those without a lease first, then those with the
            least memory in use.

    Returns:
        the devices in the order of `devices`, none if there are too few; who is on the others -> labels of these.
    """
    holders = {device.name: leased.get(device.name) or ", ".join(device.used_by) for device in devices}
    free = [device for device in devices if not holders[device.name]]
    obstacles: dict[str, list[str]] = {}
    for device in devices:
        if holders[device.name]:
            obstacles.setdefault(holders[device.name], []).append(device.label)
    # One slice of each GPU before a second one of any: NCCL connects no two of one GPU.
    chosen = sorted(free, key=lambda device: _turn(device, free))[:count]
    if share and len(free) < count:
        busy = [device for device in devices if holders[device.name]]
        busy.sort(key=lambda device: (device.name in leased, device.used_bytes))
        chosen += busy[: count - len(free)]
    if len(chosen) < count:
        return (), obstacles
    return tuple(device for device in devices if device in chosen), obstacles


def _turn(device: Device, free: Sequence[Device]) -> int:
    """Returns how many devices of the same GPU come before this one."""
    return 0 if device.gpu is None else [one for one in free if one.gpu == device.gpu].index(device)


def held_devices(taken: Sequence[Device], devices: Sequence[Device], *, ranks: int) -> DeviceLease:
    """Returns what a job's ranks get to see: UUIDs, for an index means another GPU where CUDA sorts them by speed.

    Args:
        taken: devices of the job.
        devices: those it might have seen; the variable stays as it is if it got all of them and their numbers are sure.
        ranks: ranks on this machine.
    """
    labels = tuple(device.label for device in taken)
    if any(device.is_slice for device in taken):
        return DeviceLease(slices=tuple(taken[rank % len(taken)].name for rank in range(ranks)), labels=labels)
    if tuple(taken) == tuple(devices) and not any(device.may_be_renumbered for device in taken):
        return DeviceLease(labels=labels)
    return DeviceLease(cuda_visible_devices=",".join(device.name for device in taken), labels=labels)


def user_of_process(pid: int, *, proc: Path = Path("/proc")) -> str | None:
    """Returns the name of a process's user; its number where it has no name, None if the process is not to be seen."""
    try:
        uid = os.stat(proc / str(pid)).st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_line() -> list[int]:
    """Returns this process and those that started it, as far up as can be seen."""
    line = [os.getpid()]
    parent = os.getppid()
    while parent > 0 and parent not in line:
        line.append(parent)
        parent = _parent_of(parent)
    return line


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # pid (name) state ppid ...; a name may hold blanks and brackets.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the driver does not know of processes: their users, which are our own, and that Windows draws."""

    user_of: Callable[[int], str | None]
    own: frozenset[int]
    in_wsl: bool


def _read(nvml: Any, visible: str | None, known: _Known) -> tuple[Device, ...]:
    handles = [gpu_handle(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    found = _listed(nvml, visible, known, handles)
    return tuple(replace(device, may_be_renumbered=True) for device in found) if None in handles else found


def _listed(nvml: Any, visible: str | None, known: _Known, handles: Sequence[Any]) -> tuple[Device, ...]:
    uuids: list[str | None] = []
    parts: list[list[Device]] = []
    for index, handle in enumerate(handles):
        if handle is None:
            continue
        uuids.append(text_of(ask_driver(nvml, nvml.nvmlDeviceGetUUID, handle)))
        slices = slice_handles(nvml, handle)
        if slices is None:
            parts.append([_device(nvml, handle, index, None, known)])
        else:
            parts.append([_device(nvml, part, index, number, known) for number, part in slices])
    if visible is None:
        return tuple(device for devices in parts for device in devices)
    slice_of = {device.name: device for devices in parts for device in devices if device.is_slice}
    return tuple(
        device
        for entry in listed_devices(visible, uuids, slices=slice_of)
        for device in (
            # Of a GPU in MIG mode that is named as a whole, CUDA shows the first slice.
            parts[entry][:1]
            if isinstance(entry, int)
            else [slice_of.get(entry, Device(name=entry, label=f"slice {entry}", is_slice=True))]
        )
    )


def _device(nvml: Any, handle: Any, gpu: int, part: int | None, known: _Known) -> Device:
    memory: Any = ask_driver(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    total_bytes, free_bytes = (0, 0) if memory is None else (int(memory.total), int(memory.free))
    used_bytes = total_bytes - free_bytes
    users = read_users(
        nvml,
        handle,
        used_bytes=used_bytes,
        desktop_most_bytes=total_bytes // 2 if known.in_wsl else 0,
        # Only those are named that keep a job away: a user database on the network may be slow.
        user_of=lambda _: None,
    )
    strangers = [one for one in users.processes or () if one.counts and one.pid not in known.own]
    used_by = [replace(one, user=known.user_of(one.pid)).label for one in strangers]
    if users.unseen_bytes:
        used_by.append(f"processes that cannot be seen from here ({users.unseen_bytes >> 30} GiB)")
    number = f"{gpu}" if part is None else f"{gpu}:{part}"
    return Device(
        name=text_of(ask_driver(nvml, nvml.nvmlDeviceGetUUID, handle)) or number,
        label=f"GPU {gpu}" if part is None else f"slice {part} of GPU {gpu}",
        is_slice=part is not None,
        gpu=gpu,
        used_by=tuple(used_by),
        used_bytes=used_bytes,
        desktop_bytes=users.desktop_bytes,
    )
