from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dsrun.launcher.machine.host import full_name, read_host
from dsrun.launcher.machine.limits import locks_without_limit, parse_limits, read_process_limits, umask_of
from support.topologies import write_tree

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max stack size            8388608              unlimited            bytes
Max processes             96365                96365                processes
Max open files            1024                 524288               files
Max locked memory         65536                unlimited            bytes
Max nice priority         0                    0
"""


@pytest.mark.parametrize(
    ("name", "hosts", "full"),
    [
        ("box.lab.example", "", "box.lab.example"),
        ("box", "10.0.0.5 box.lab.example box\n", "box.lab.example"),
        ("box", "10.0.0.5 boxer.lab.example boxer\n", None),
        ("box", "# 10.0.0.5 box.lab box\n127.0.1.1 box\n", None),
    ],
)
def test_the_full_name_comes_from_the_name_or_from_etc_hosts(name: str, hosts: str, full: str | None) -> None:
    assert full_name(name, hosts) == full


def test_limits_are_read_soft_and_hard_and_none_is_unlimited(tmp_path: Path) -> None:
    found = read_process_limits(write_tree(tmp_path, {"proc/self/limits": LIMITS}))
    assert found is not None
    assert (found.nofile, found.nofile_hard, found.nproc, found.stack_bytes) == (1024, 524288, 96365, 8388608)
    assert (found.memlock_bytes, found.memlock_hard_bytes, found.core_bytes) == (65536, None, None)


@pytest.mark.parametrize("text", ["", "Limit\n", "Limit\nrubbish\n"])
def test_limits_that_cannot_be_read_are_none(tmp_path: Path, text: str) -> None:
    assert parse_limits(text) == {}
    assert read_process_limits(write_tree(tmp_path, {"proc/self/limits": text})) is None


def test_the_kernel_tells_the_limits_of_this_process_in_that_form() -> None:
    found = read_process_limits(Path("/"))
    assert found is not None
    assert found.nofile is None or found.nofile > 0


def test_the_umask_is_read_and_not_set() -> None:
    assert umask_of("Name:\tx\nUmask:\t0027\n") == "0027"
    assert umask_of("Name:\tx\n") is None


def test_a_host_is_told_with_its_boot_and_its_user(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/uptime": "12.50 90.00\n",
            "proc/sys/kernel/random/boot_id": "aaaa-bbbb\n",
            "proc/sys/kernel/core_pattern": "|/usr/lib/systemd/systemd-coredump %P\n",
            "proc/self/status": "Umask:\t0022\n",
            "etc/os-release": "PRETTY_NAME='Debian 12'\n",
        },
    )
    host = read_host(root, {}, virtual=None)
    assert (host.name, host.kernel) == (socket.gethostname(), os.uname().release)
    assert (host.uptime_s, host.boot_id, host.umask, host.os) == (12.5, "aaaa-bbbb", "0022", "Debian 12")
    assert host.core_pattern == "|/usr/lib/systemd/systemd-coredump %P"
    assert host.user


@pytest.mark.parametrize(
    ("capabilities", "users", "may"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("0000000000000000", "0 0 4294967295", False),
        # Root of a container with users of its own: the kernel asks for the capability of the machine.
        ("000001ffffffffff", "0 100000 65536", False),
    ],
)
def test_root_of_the_machine_locks_memory_beyond_its_limit(
    tmp_path: Path, capabilities: str, users: str, may: bool
) -> None:
    write_tree(
        tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n", "proc/self/uid_map": f"{users}\n"}
    )
    assert locks_without_limit(tmp_path) == may
    write_tree(tmp_path, {"proc/self/limits": LIMITS})
    found = read_process_limits(tmp_path)
    assert found is not None
    assert found.lockable_bytes == (None if may else 65536)
