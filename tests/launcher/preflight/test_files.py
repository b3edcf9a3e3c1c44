"""Files that a host lacks, or has others of, are named with the host; so is a disk without room."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.launcher.machine.storage import Room
from dsrun.launcher.preflight.findings import Requirements
from support.host_facts import GIB, judged, only, script


def test_a_folder_or_script_that_is_missing_is_named_with_its_host() -> None:
    missing = script(digest=None, fault="/data/train.py: no such file or directory")
    odd: dict[str, dict[str, Any]] = {
        "n2": {"folder_fault": "/data: no such file or directory", "files": missing},
        "n3": {"files": missing},
    }
    found = judged(3, odd, files=script())
    assert [(finding.verdict, finding.name, finding.text) for finding in found] == [
        ("red", "folder", "n2: /data: no such file or directory"),
        ("red", "script", "n3: /data/train.py: no such file or directory"),
    ]


def test_another_content_of_the_script_is_refused() -> None:
    found = judged(5, {"n4": {"files": script(digest="9:bbbbbbbbbb")}}, files=script())
    text = "/data/train.py: content aaaaaaaa on n1, n2, n3 and n5, content bbbbbbbb on n4"
    assert only(found) == ("red", "script", text, ("n4",))


def test_python_files_that_differ_or_are_missing_are_named() -> None:
    wants = Requirements(folder="/data", script="/data/train.py", on_gpus=False)
    usual = {"train.py": "1", "net.py": "2", "data/load.py": "3", "a.py": "4", "b.py": "5"}
    odd = {
        "n3": {"code": {**usual, "net.py": "9", "train.py": "9"}},
        "n4": {"code": {"train.py": "1", "net.py": "2"}},
        "n5": {"code": None},
    }
    found = judged(5, odd, wants=wants, code=usual)
    assert [(finding.verdict, finding.text) for finding in found] == [
        ("amber", "a.py, b.py, data/load.py: not the same on n4 as on the other hosts"),
        ("amber", "net.py: not the same on n3 as on the other hosts"),
    ]


def a_path(there: str = "/nvme/0", *, free: int = 900 * GIB, fault: str | None = None) -> tuple[Room, ...]:
    return (Room(path="/nvme/0", there=there, free_bytes=free, fault=fault),)


@pytest.mark.parametrize(
    ("paths", "verdict", "text"),
    [
        (a_path(free=0), "red", "n2: no space left for /nvme/0"),
        (a_path(free=3 * GIB), "amber", "n2: 3.0 GiB free for /nvme/0"),
        (a_path("/"), "amber", "n2: /nvme/0 is not there, as it is on n1 and n3"),
        (
            a_path(fault="cannot be written to"),
            "red",
            "n2: /nvme/0 cannot be written to",
        ),
    ],
)
def test_a_disk_that_is_full_missing_or_locked_is_told(paths: Any, verdict: str, text: str) -> None:
    assert only(judged(3, {"n2": {"paths": paths}}, paths=a_path())) == (verdict, "disk", text, ("n2",))


def test_a_working_folder_with_little_room_is_told_and_refuses_nothing() -> None:
    odd = {"n2": {"folder_free_bytes": 0}, "n3": {"folder_free_bytes": None}}
    text = "n2: 0 B free in the working folder /work"
    wants = Requirements(folder="/work")
    assert only(judged(3, odd, wants=wants)) == ("amber", "disk", text, ("n2",))
    assert only(judged(2, wants=wants, folder_free_bytes=GIB >> 1))[2].endswith(
        "512.0 MiB free in the working folder /work"
    )
