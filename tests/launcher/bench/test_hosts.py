"""Hosts measure one thing after another, pairs in rounds; what cannot be measured is told and stops nothing."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import pytest

from dsrun.launcher.bench.hosts import measure_hosts, measure_pairs, rounds_of
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.rendezvous.host_addresses import addresses
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.local import LocalTransport


def host(name: str, python: str | None = None) -> HostSpec:
    return HostSpec(name=name, slots=1, source="test", python=python)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 16])
def test_every_two_hosts_meet_once_and_no_host_is_twice_in_a_round(count: int) -> None:
    names = [f"n{index}" for index in range(count)]
    rounds = list(rounds_of(names))
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert set(met) == {frozenset(pair) for pair in combinations(names, 2)}
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    assert len(rounds) <= max(0, count - 1 + count % 2)


def test_each_group_is_measured_and_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    missing = str(tmp_path / "no")
    with Survey([host("n1")], LocalTransport(), python=sys.executable) as survey:
        found = measure_hosts(survey, [host("n1")], paths=[str(tmp_path), missing], cap_bytes=8 << 20, say=said.append)[
            "n1"
        ]
    assert found["memory"][0]["figures"][0]["name"] == "memory copy, one core"
    there, not_there = found["disk"]
    assert (there["path"], len(there["figures"])) == (str(tmp_path), 4)
    assert not_there["error"] == f"{missing}: cannot be measured: No such file or directory"
    assert not_there["hint"] == "name a folder you may write to: `--path DIR`"
    assert found["gpu"][0]["figures"]
    assert said == [
        *("memory copies", f"the disk at {tmp_path}", f"the disk at {missing}", "torch: copies and matrix products")
    ]


@pytest.mark.skipif(all(entry.unfit for entry in addresses()), reason="this machine has no address but loopback")
def test_pairs_are_measured_and_hosts_that_are_not_there_are_left_out() -> None:
    hosts = [host("n1"), host("away", python="/no/python"), host("n2"), host("n3")]
    said: list[str] = []
    with Survey(hosts, LocalTransport(), python=sys.executable) as survey:
        pairs = measure_pairs(survey, hosts, say=said.append)
    assert {frozenset((pair["to"], pair["from"])) for pair in pairs} == {
        frozenset(pair) for pair in combinations(("n1", "n2", "n3"), 2)
    }
    assert all(pair["figures"][1]["unit"] == "B/s" and pair["address"] for pair in pairs)
    assert said[-1] == "ways between hosts, round 3 of 3"
