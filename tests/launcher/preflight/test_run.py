"""Hosts are asked all at once, and what they say of themselves is judged together with where they can meet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.preflight.findings import AnsweredHost, Preflight, Requirements
from dsrun.launcher.preflight.run import check_hosts
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.base import Channel
from dsrun.launcher.transport.local import LocalTransport


class _Town:
    """Every host is this machine, but for those that are away."""

    def __init__(self, *away: str) -> None:
        self._away = away
        self._local = LocalTransport()

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        if host.name in self._away:
            raise LaunchError(f"host {host.name}: connection refused", hint="is sshd running?")
        return self._local.start(host, argv)


def check(count: int, wants: Requirements, *away: str) -> Preflight:
    hosts = [HostSpec(name=f"n{index + 1}", slots=1, source="test") for index in range(count)]
    with Survey(hosts, _Town(*away), python=sys.executable) as survey:
        return check_hosts(survey, hosts, wants)


def texts(preflight: Preflight, verdict: str) -> list[str]:
    return [f"{found.name}: {found.text}" for found in preflight.findings if found.verdict == verdict]


def test_sixteen_surveyors_of_one_machine_are_alike_but_for_being_one_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    wants = Requirements(folder=str(tmp_path), script="train.py", on_gpus=False, paths=("checkpoints",), iface="lo")
    preflight = check(16, wants)
    assert texts(preflight, "red") == []
    assert "machine: all 16 hosts: one machine" in texts(preflight, "amber")
    assert preflight.meeting is not None
    assert preflight.meeting.address == "127.0.0.1"
    for seen in preflight.seen.values():
        assert isinstance(seen, AnsweredHost)
        # One clock: what is measured between them is within what is said of the measure.
        assert abs(seen.clock_offset_s) <= seen.clock_doubt_s + 0.05
        assert seen.facts.files["script"].digest is not None
        assert seen.facts.paths[0].there == str(tmp_path)


def test_a_missing_host_a_missing_script_and_an_unknown_interface_are_told_together(tmp_path: Path) -> None:
    wants = Requirements(folder=str(tmp_path), script="train.py", on_gpus=False, iface="none-such")
    preflight = check(3, wants, "n3")
    assert sorted(texts(preflight, "red")) == [
        "host: n3: connection refused",
        "network: host n1: `--iface none-such`: no interface of that name has an address",
        f"script: n1 and n2: {tmp_path}/train.py: no such file or directory",
    ]
    assert preflight.meeting is None


def test_variables_for_nccl_reach_the_facts_of_each_host() -> None:
    env = {"n2": {"NCCL_NET_PLUGIN": "none"}}
    hosts = [HostSpec(name=name, slots=1, source="test", env=env.get(name, {})) for name in ("n1", "n2")]
    wants = Requirements(on_gpus=False, nccl={"NCCL_NET": "Socket"}, iface="lo")
    with Survey(hosts, _Town(), python=sys.executable) as survey:
        seen = check_hosts(survey, hosts, wants).seen
    told = {name: its.facts.net_variables for name, its in seen.items() if isinstance(its, AnsweredHost)}
    assert told == {"n1": ("NCCL_NET",), "n2": ("NCCL_NET", "NCCL_NET_PLUGIN")}


def test_where_the_first_host_is_away_nobody_looks_for_a_place_to_meet() -> None:
    preflight = check(2, Requirements(on_gpus=False), "n1")
    assert texts(preflight, "red") == ["host: n1: connection refused"]
    assert preflight.meeting is None


def test_a_job_of_one_host_meets_there() -> None:
    meeting = check(1, Requirements(on_gpus=False)).meeting
    assert meeting is not None
    assert meeting.address == "127.0.0.1"
