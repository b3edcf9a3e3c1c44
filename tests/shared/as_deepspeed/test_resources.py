"""Hosts and slots as scripts of DeepSpeed hold them: what 0.19.8's functions return, in dicts of the same order."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dsrun.as_deepspeed.commands.resources import (
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from dsrun.errors import HostfileError

POOL = {"worker-1": 2, "worker-0": 4}


def test_a_hostfile_is_a_pool_in_its_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two machines\nworker-1 slots=2\n\nworker-0 slots=4 # the other\n")
    found = fetch_hostfile(str(file))
    assert found is not None
    assert list(found.items()) == list(POOL.items())
    with caplog.at_level(logging.WARNING, logger="dsrun"):
        assert fetch_hostfile(str(tmp_path / "none")) is None
    assert "this machine alone is meant" in caplog.text
    file.write_text("worker-1 slots=2\nworker-1 slots=3\n")
    with pytest.raises(HostfileError, match="worker-1"):
        fetch_hostfile(file)


@pytest.mark.parametrize(
    ("inclusion", "exclusion", "expected"),
    # Recorded from DeepSpeed 0.19.8.
    [
        ("", "", {"worker-1": [0, 1], "worker-0": [0, 1, 2, 3]}),
        ("worker-0:0,2", "", {"worker-0": [0, 2]}),
        ("worker-0@worker-1:1", "", {"worker-1": [1], "worker-0": [0, 1, 2, 3]}),
        ("worker-0:2@worker-0:1", "", {"worker-0": [1, 2]}),
        ("", "worker-1", {"worker-0": [0, 1, 2, 3]}),
        ("", "worker-0:1@worker-1:0", {"worker-1": [1], "worker-0": [0, 2, 3]}),
    ],
)
def test_a_filter_chooses_slots(inclusion: str, exclusion: str, expected: dict[str, list[int]]) -> None:
    found = parse_inclusion_exclusion(POOL, inclusion, exclusion)
    assert list(found.items()) == list(expected.items())


def test_a_filter_chooses_among_slots_that_are_left() -> None:
    left = {"worker-0": [1, 3]}
    assert parse_resource_filter(left) is left
    assert parse_resource_filter(left, include_str="worker-0:3") == {"worker-0": [3]}
    with pytest.raises(HostfileError, match="0"):
        parse_resource_filter(left, include_str="worker-0:0")
    with pytest.raises(HostfileError, match="cannot be used together"):
        parse_resource_filter(left, "worker-0", "worker-0:1")
    with pytest.raises(HostfileError, match="worker-9"):
        parse_inclusion_exclusion(POOL, "worker-9", "")


def test_resources_travel_as_deepspeed_sends_them() -> None:
    assert encode_world_info({"worker-1": [1]}) == "eyJ3b3JrZXItMSI6IFsxXX0="
