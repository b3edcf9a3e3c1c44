from __future__ import annotations

import os
from pathlib import Path

from dsrun.launcher.probe_xid import parse_xids, read_xids
from support.topologies import write_tree

LOG = """\
4,1,10,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module
4,2,11,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=99, name=python, Ch 00000008
4,3,12,-;NVRM: Xid (PCI:0000:DF:00.0): 79, pid='<unknown>', GPU has fallen off the bus.
4,4,13,-;NVRM: Xid (PCI:0000:1b:00): 94, pid=99
"""


def test_errors_are_told_by_the_address_of_the_gpu_in_their_order() -> None:
    assert parse_xids(LOG) == {"0000:1b:00.0": (31, 94), "0000:df:00.0": (79,)}
    assert parse_xids("") == {}


def test_the_log_is_read_to_its_end(tmp_path: Path) -> None:
    write_tree(tmp_path, {"dev/kmsg": LOG * 2000})
    found = read_xids(tmp_path)
    assert isinstance(found, dict)
    assert len(found["0000:1b:00.0"]) == 4000


def test_a_log_with_nothing_new_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    writer = os.open(tmp_path / "dev/kmsg", os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(writer, LOG.encode())
        assert read_xids(tmp_path) == parse_xids(LOG)
    finally:
        os.close(writer)


def test_a_log_that_may_not_be_read_is_a_reason(tmp_path: Path) -> None:
    assert read_xids(tmp_path) == "/dev/kmsg: no such file or directory"
