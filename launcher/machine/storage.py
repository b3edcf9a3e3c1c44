"""File systems that a job uses, and the NVMe drives below them. Writes nothing that has a name, measures nothing."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from .cgroup import unescape_mount
from .pci import PcieLink, place_of, read_link, read_number
from .proc_files import is_there, read_text, resolved

#: Files are on another machine: slow for many small ones, and a hang there is a hang here.
NETWORK_FILESYSTEMS = frozenset(
    {
        *(
            "nfs",
            "nfs4",
            "cifs",
            "smb3",
            "ceph",
            "lustre",
            "gpfs",
            "beegfs",
            "glusterfs",
            "9p",
            "afs",
            "pvfs2",
            "wekafs",
        ),
        *("fuse.glusterfs", "fuse.ceph", "fuse.sshfs", "fuse.s3fs", "fuse.juicefs", "fuse.gcsfuse", "fuse.beegfs"),
    }
)
_SECTOR_BYTES = 512
#: For a network file system to answer; one that works does so in milliseconds.
_PATIENCE_S = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of mountinfo: what is mounted where; `device` is `major:minor`."""

    point: PurePosixPath
    filesystem: str
    source: str
    device: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A folder that a job writes to, or the nearest place above it that is there.

    Attributes:
        path: path that was asked for, made absolute.
        there: the place that was looked at.
        free_bytes: bytes that an ordinary user may still write there; None where the file system does not tell.
        fault: reason why this user can write nothing there, as the end of a sentence: `is read-only`; None if it can.
    """

    path: str
    there: str
    free_bytes: int | None
    fault: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReport(Room):
    """The file system of a path that a job uses; links of `path` are resolved.

    Attributes:
        mount: folder at which the path's file system is mounted; None where it is not known.
        source: the device or export.
        filesystem: its type.
        network: whether the path's file system is on another machine; None where it is not known.
        answers: the other machine answered in time; nothing else is told of it if not.
        read_only: whether the path's file system is mounted read-only; None where it is not known.
        total_bytes: bytes of the whole file system; None where it does not answer.
        free_inodes: number of files that may still be made; None where the file system does not answer, or does not
            count them.
        direct_io: O_DIRECT works there.
    """

    mount: str | None
    source: str | None
    filesystem: str | None
    network: bool | None
    answers: bool | None
    read_only: bool | None
    total_bytes: int | None
    free_inodes: int | None
    direct_io: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeDrive:
    """An NVMe drive and where it is mounted, through partitions, RAID and LVM."""

    name: str
    model: str | None
    firmware: str | None
    size_bytes: int | None
    pcie: PcieLink
    numa_node: int | None
    queue_depth: int | None
    mounts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageReport:
    """Storage of the machine.

    Attributes:
        paths: those that were asked about, the working folder first.
        nvme: drives.
        io_uring: the kernel lets every process use it; None where it is older than the switch (Linux 6.6).
        gds: the driver of GPUDirect Storage is loaded.
    """

    paths: tuple[PathReport, ...]
    nvme: tuple[NvmeDrive, ...]
    io_uring: bool | None
    gds: bool


def read_storage(root: Path, paths: Sequence[Path]) -> StorageReport:
    """Looks at paths and drives.

    Args:
        root: `/`, or a made-up tree with proc/self/mountinfo and sys/block.
        paths: paths on this machine to look at; for a path that is not there, the nearest folder above it.
    """
    mounts = parse_mounts(read_text(root / "proc/self/mountinfo") or "")
    switch = read_number(root / "proc/sys/kernel/io_uring_disabled")
    return StorageReport(
        paths=tuple(_path(path, mounts) for path in paths),
        nvme=tuple(_drives(root / "sys/block", mounts)),
        io_uring=None if switch is None else switch == 0,
        gds=is_there(root / "proc/driver/nvidia-fs"),
    )


def room_of(path: str) -> Room:
    """Looks at where a folder is, or is to be made.

    Args:
        path: absolute.
    """
    there = _nearest(Path(path))
    stat = _stat_of(there)
    return Room(path=path, there=str(there), free_bytes=_free_bytes(stat), fault=_write_fault(there, stat))


def space_of(path: Path) -> tuple[int, int] | None:
    """Returns (all bytes, bytes an ordinary user may write) of the filesystem at `path`; None where it cannot be told.

    Args:
        path: path that exists.
    """
    stat = _stat_of(path)
    return None if stat is None else (stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def parse_mounts(mountinfo: str) -> tuple[Mount, ...]:
    """Reads /proc/self/mountinfo."""
    mounts: list[Mount] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, source = before.split(" "), after.split(" ")
        if len(fields) > 5 and source[0]:
            mounts.append(
                Mount(
                    point=PurePosixPath(unescape_mount(fields[4])),
                    filesystem=source[0],
                    source=unescape_mount(source[1]) if len(source) > 1 else "",
                    device=fields[2],
                    read_only="ro" in fields[5].split(",") or (len(source) > 2 and "ro" in source[2].split(",")),
                )
            )
    return tuple(mounts)


def mount_of(path: PurePosixPath, mounts: Sequence[Mount]) -> Mount | None:
    """Finds what holds an absolute path: the deepest mount, of two on one point the later, which hides the other."""
    best: Mount | None = None
    for mount in mounts:
        deeper = best is None or len(mount.point.parts) >= len(best.point.parts)
        if deeper and path.is_relative_to(mount.point):
            best = mount
    return best


def direct_io_works(folder: Path) -> bool | None:
    """Tries O_DIRECT on a file without a name, which is gone when it is closed; None where none can be made."""
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # What has no O_DIRECT says EINVAL; no right to write, or no O_TMPFILE (NFS), tells nothing of it.
        return False if error.errno == errno.EINVAL else None
    os.close(handle)
    return True


def answer_within(call: Callable[[], _T], patience_s: float) -> _T | None:
    """Returns what a call returns; None if it takes longer, and then it is left to itself.

    A server that is away holds up whoever asks its file system, for minutes or for ever, and no signal ends that.

    Args:
        call: function to wait for; it raises nothing.
        patience_s: longest time in seconds to wait for `call`.
    """
    found: list[_T] = []
    # A daemon: the process may end while it still hangs.
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(patience_s)
    return found[0] if found else None


def _path(path: Path, mounts: Sequence[Mount]) -> PathReport:
    try:
        # Only what mountinfo says of it as it is written: following links would ask the file system.
        written = Path(os.path.abspath(path))
    except OSError:
        # Relative to a working folder that is gone.
        return _report(path, path, None, None, answers=None)
    mount = mount_of(PurePosixPath(written), mounts)
    if mount is None or mount.filesystem not in NETWORK_FILESYSTEMS:
        return _look(path, mounts)
    found = answer_within(lambda: _look(path, mounts), _PATIENCE_S)
    return _report(written, written, mount, None, answers=False) if found is None else found


def _look(path: Path, mounts: Sequence[Mount]) -> PathReport:
    whole = resolved(path)
    there = _nearest(whole)
    # Of a file the folder that holds it tells what can be written there.
    folder = there if os.path.isdir(there) else there.parent
    mount = mount_of(PurePosixPath(folder), mounts)
    network = mount is not None and mount.filesystem in NETWORK_FILESYSTEMS
    stat = _stat_of(there)
    return _report(
        whole,
        there,
        mount,
        stat,
        answers=True if network else None,
        direct_io=direct_io_works(folder),
        fault=_write_fault(there, stat),
    )


def _report(
    path: Path,
    there: Path,
    mount: Mount | None,
    stat: os.statvfs_result | None,
    *,
    answers: bool | None,
    direct_io: bool | None = None,
    fault: str | None = None,
) -> PathReport:
    return PathReport(
        path=str(path),
        there=str(there),
        mount=None if mount is None else str(mount.point),
        source=None if mount is None else mount.source,
        filesystem=None if mount is None else mount.filesystem,
        network=None if mount is None else mount.filesystem in NETWORK_FILESYSTEMS,
        answers=answers,
        read_only=None if mount is None else mount.read_only,
        total_bytes=None if stat is None else stat.f_blocks * stat.f_frsize,
        free_bytes=_free_bytes(stat),
        free_inodes=None if stat is None or stat.f_files == 0 else stat.f_favail,
        direct_io=direct_io,
        fault=fault,
    )


def _nearest(path: Path) -> Path:
    """Returns what is there of a path, at the least its root."""
    # Not Path.exists, which raises for what may not be looked at.
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _stat_of(path: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(path)
    except OSError:
        return None


def _free_bytes(stat: os.statvfs_result | None) -> int | None:
    # Some file systems count no blocks: that is no full disk.
    return None if stat is None or stat.f_blocks == 0 else stat.f_bavail * stat.f_frsize


def _write_fault(there: Path, stat: os.statvfs_result | None) -> str | None:
    if not os.path.isdir(there):
        return "is not a folder"
    if stat is not None and stat.f_flag & os.ST_RDONLY:
        return "is read-only"
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        return "cannot be written to"
    return None


def _drives(blocks: Path, mounts: Sequence[Mount]) -> Iterator[NvmeDrive]:
    for name in sorted(_names(blocks)):
        # `nvme0c0n1` is a path of a drive that has several.
        if not name.startswith("nvme") or "c" in name.removeprefix("nvme"):
            continue
        folder = blocks / name
        place = place_of(folder / "device")
        sectors = read_number(folder / "size")
        numbers = set(_device_numbers(folder))
        yield NvmeDrive(
            name=name,
            model=(read_text(folder / "device/model") or "").strip() or None,
            firmware=(read_text(folder / "device/firmware_rev") or "").strip() or None,
            size_bytes=None if sectors is None else sectors * _SECTOR_BYTES,
            pcie=read_link(folder / "device/device"),
            numa_node=None if place is None else place.numa_node,
            queue_depth=read_number(folder / "queue/nr_requests"),
            mounts=tuple(sorted({str(mount.point) for mount in mounts if mount.device in numbers})),
        )


def _device_numbers(folder: Path) -> Iterator[str]:
    """Yields `major:minor` of a block device, its partitions, and whatever RAID or LVM was put on them."""
    number = (read_text(folder / "dev") or "").strip()
    if number:
        yield number
    for name in _names(folder):
        if name.startswith(folder.name) and is_there(folder / name / "partition"):
            yield from _device_numbers(folder / name)
    for name in _names(folder / "holders"):
        yield from _device_numbers(folder / "holders" / name)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
