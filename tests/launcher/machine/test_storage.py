from __future__ import annotations

import os
import threading
from pathlib import Path, PurePosixPath

import pytest

from dsrun.launcher.machine.storage import (
    answer_within,
    direct_io_works,
    mount_of,
    parse_mounts,
    read_storage,
    room_of,
    space_of,
)
from support.machines import recorded_machine
from support.topologies import write_tree

MOUNTINFO = (
    "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / /home rw - nfs4 nas:/ rw\n"
    "3 1 8:2 / /tmp rw - xfs /dev/b rw\n4 3 0:7 / /tmp rw - tmpfs tmpfs rw\n"
    "5 1 8:3 / /my\\040disk ro,relatime shared:1 - ext4 /dev/c rw\n6 1 8:4 / /ro rw - ext4 /dev/d ro\njunk\n"
)


@pytest.mark.parametrize(
    ("path", "kind"), [("/home/u/x", "nfs4"), ("/home", "nfs4"), ("/homes", "ext4"), ("/tmp/a", "tmpfs")]
)
def test_a_path_is_held_by_the_deepest_and_latest_mount(path: str, kind: str) -> None:
    mount = mount_of(PurePosixPath(path), parse_mounts(MOUNTINFO))
    assert mount is not None
    assert mount.filesystem == kind


def test_mounts_know_blanks_and_what_is_read_only() -> None:
    mounts = {str(mount.point): mount for mount in parse_mounts(MOUNTINFO)}
    assert len(mounts) == 5
    assert (mounts["/my disk"].source, mounts["/my disk"].read_only) == ("/dev/c", True)
    assert (mounts["/ro"].read_only, mounts["/home"].read_only) == (True, False)


def test_a_path_that_is_not_there_is_told_by_the_folder_above(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"proc/self/mountinfo": f"1 0 8:1 / {tmp_path} rw - nfs4 nas:/x rw\n"})
    (place,) = read_storage(tree, [tmp_path / "new" / "deep"]).paths
    stat = os.statvfs(tmp_path)
    assert (place.path, place.mount, place.source) == (str(tmp_path / "new/deep"), str(tmp_path), "nas:/x")
    assert (place.network, place.answers, place.read_only) == (True, True, False)
    assert place.total_bytes == stat.f_blocks * stat.f_frsize
    assert not (tmp_path / "new").exists()


def test_a_server_that_is_away_is_not_waited_for() -> None:
    back = threading.Event()
    try:
        assert answer_within(lambda: back.wait(60), 0.05) is None
    finally:
        back.set()
    assert answer_within(lambda: "here", 60) == "here"


def test_a_path_that_cannot_be_looked_at_is_told_by_what_is_above(tmp_path: Path) -> None:
    (place,) = read_storage(tmp_path, [tmp_path / ("x" * 300) / "deep"]).paths
    assert place.path == str(tmp_path / ("x" * 300) / "deep")
    assert place.total_bytes is not None


def test_a_link_that_cannot_be_read_is_no_crash(tmp_path: Path) -> None:
    # The program of a process that has ended and not been waited for is such a link.
    pid = os.posix_spawn("/bin/true", ["true"], {})
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        (place,) = read_storage(tmp_path, [Path(f"/proc/{pid}/exe")]).paths
        assert place.path == f"/proc/{pid}/exe"
    finally:
        os.waitpid(pid, 0)


def test_a_path_below_a_working_folder_that_is_gone_is_told_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    (place,) = read_storage(tmp_path, [Path("offload")]).paths
    assert (place.path, place.mount, place.total_bytes) == ("offload", None, None)


def test_a_folder_that_is_to_be_made_has_the_room_of_the_nearest_above_it(tmp_path: Path) -> None:
    found = room_of(str(tmp_path / "out" / "checkpoints"))
    assert (found.path, found.there, found.fault) == (f"{tmp_path}/out/checkpoints", str(tmp_path), None)
    total, free = space_of(tmp_path) or (0, 0)
    assert 0 < (found.free_bytes or 0) < total
    assert free < total
    (place,) = read_storage(tmp_path, [tmp_path / "out"]).paths
    assert (place.there, place.fault) == (str(tmp_path), None)


def test_a_path_that_is_a_file_is_no_folder_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert room_of(str(tmp_path / "file")).fault == "is not a folder"
    below = room_of(str(tmp_path / "file" / "below"))
    assert (below.there, below.fault) == (str(tmp_path / "file"), "is not a folder")
    (place,) = read_storage(tmp_path, [tmp_path / "file"]).paths
    assert place.fault == "is not a folder"


def test_the_room_of_what_is_not_there_is_not_told(tmp_path: Path) -> None:
    assert space_of(tmp_path / "gone") is None


def test_links_of_a_path_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (place,) = read_storage(tmp_path, [tmp_path / "link"]).paths
    assert (place.path, place.mount, place.network) == (str(tmp_path / "real"), None, None)


def test_trying_direct_io_leaves_nothing_behind(tmp_path: Path) -> None:
    assert direct_io_works(tmp_path) in (True, False, None)
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_made_direct_io_is_not_told() -> None:
    assert direct_io_works(Path("/proc/self")) is None


def test_a_drive_is_told_with_its_link_and_the_mount_of_its_partition(tmp_path: Path) -> None:
    (drive,) = recorded_machine("l40s_pcie", tmp_path).report().storage.nvme
    assert (drive.name, drive.model, drive.mounts) == ("nvme0n1", "Micron_7450_MTFDKCC3T8TFR", ("/",))
    assert (drive.pcie.generation, drive.pcie.width, drive.pcie.width_max) == (4, 2, 4)
    assert (drive.size_bytes, drive.numa_node, drive.queue_depth) == (3577 << 30, 0, 1023)


def test_drives_of_an_array_have_its_mount(tmp_path: Path) -> None:
    drives = recorded_machine("dgx_h100", tmp_path).report().storage.nvme
    assert {drive.name: drive.mounts for drive in drives} == {
        "nvme0n1": ("/",),
        "nvme2n1": ("/raid",),
        "nvme3n1": ("/raid",),
    }


def test_paths_of_a_drive_that_has_several_are_no_drives(tmp_path: Path) -> None:
    block = "sys/block"
    write_tree(tmp_path, {f"{block}/nvme0c0n1/size": "1\n", f"{block}/sda/size": "1\n", f"{block}/nvme0n1/size": "2\n"})
    (drive,) = read_storage(tmp_path, []).nvme
    assert (drive.name, drive.size_bytes, drive.model, drive.mounts) == ("nvme0n1", 1024, None, ())


@pytest.mark.parametrize(("text", "usable"), [("0\n", True), ("1\n", False), ("2\n", False), ("", None)])
def test_the_kernels_switch_of_io_uring_is_read(tmp_path: Path, text: str, usable: bool | None) -> None:
    write_tree(tmp_path, {"proc/sys/kernel/io_uring_disabled": text})
    found = read_storage(tmp_path, [])
    assert (found.io_uring, found.gds) == (usable, False)


def test_the_driver_of_gpudirect_storage_is_seen(tmp_path: Path) -> None:
    assert read_storage(write_tree(tmp_path, {"proc/driver/nvidia-fs/version": "2\n"}), []).gds is True


def statvfs(**changes: int) -> os.statvfs_result:
    found = os.statvfs("/")
    names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag")
    return os.statvfs_result([*(changes.get(name, getattr(found, name)) for name in names), found.f_namemax])


@pytest.mark.parametrize(
    ("flag", "writable", "fault"),
    [
        (0, True, None),
        (0, False, "cannot be written to"),
        (os.ST_RDONLY, True, "is read-only"),
        # What no rights can change is told first.
        (os.ST_RDONLY, False, "is read-only"),
    ],
)
def test_why_nothing_can_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, writable: bool, fault: str | None
) -> None:
    def access(path: object, mode: int, *, effective_ids: bool = False) -> bool:
        return writable

    found = statvfs(f_flag=flag)
    monkeypatch.setattr("dsrun.launcher.machine.storage.os.statvfs", lambda path: found)
    monkeypatch.setattr("dsrun.launcher.machine.storage.os.access", access)
    room = room_of(str(tmp_path / "not/yet"))
    assert (room.there, room.fault) == (str(tmp_path), fault)
    (path,) = read_storage(tmp_path, [tmp_path]).paths
    assert path.fault == fault


def test_a_file_is_no_folder_and_the_one_that_holds_it_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("")
    assert room_of(str(file)).fault == room_of(str(file / "below")).fault == "is not a folder"
    mounts = f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / {tmp_path} rw - xfs /dev/b rw\n"
    root = write_tree(tmp_path / "root", {"proc/self/mountinfo": mounts}) or tmp_path / "root"
    at, above = read_storage(root, [file, tmp_path]).paths
    assert (at.fault, at.there) == ("is not a folder", str(file))
    assert (at.mount, at.filesystem, at.direct_io) == (above.mount, "xfs", above.direct_io)


def test_a_file_system_that_counts_no_blocks_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = statvfs(f_blocks=0, f_bavail=0)
    monkeypatch.setattr("dsrun.launcher.machine.storage.os.statvfs", lambda path: empty)
    assert room_of(str(tmp_path)).free_bytes is None
