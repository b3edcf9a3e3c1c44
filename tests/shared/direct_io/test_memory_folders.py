"""A folder whose files are memory is known by the mount that it lies in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.direct_io.memory_folders import memory_file_system

TABLE = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:20 / /dev/shm rw,nosuid shared:2 - tmpfs tmpfs rw
24 22 0:21 / /dev/shm\\040b rw - ramfs none rw
25 22 0:22 / /mnt rw - tmpfs tmpfs rw
26 22 259:2 / /mnt rw shared:3 master:1 - xfs /dev/nvme0n1 rw
27 22 0:23 / /mnt/cache rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/data", None),
        ("/dev/shm", "tmpfs"),
        ("/dev/shm/swap/run", "tmpfs"),
        ("/dev/shm b/swap", "ramfs"),
        ("/dev/shmx", None),
        ("/mnt/swap", None),
        ("/mnt/cache/swap", "tmpfs"),
    ],
)
def test_the_deepest_and_last_mount_decides(folder: str, kind: str | None, tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert memory_file_system(folder, table=table) == kind


def test_links_are_followed_and_an_unreadable_table_says_nothing(tmp_path: Path) -> None:
    table, link = tmp_path / "mountinfo", tmp_path / "link"
    table.write_text(TABLE)
    link.symlink_to("/mnt/cache")
    assert memory_file_system(str(link / "swap"), table=table) == "tmpfs"
    assert memory_file_system("/dev/shm", table=tmp_path / "none") is None
