"""Many hosts are asked at once; what they must share is judged by preflight's rules, and the rest is each one's own."""

from __future__ import annotations

import sys

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.preflight.findings import Finding, Preflight
from dsrun.launcher.probe.many_hosts import ask_hosts, compared
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.local import LocalTransport


def finding(name: str) -> Finding:
    return Finding(verdict="amber", name=name, text="t", hosts=("n1",), fix="f")


def test_what_one_host_has_wrong_alone_is_left_to_its_own_verdicts() -> None:
    names = ("host", "torch", "disk", "/dev/shm", "memlock", "nofile", "clock", "GPUs", "GPU use", "EFA", "network")
    checked = Preflight(seen={}, findings=tuple(map(finding, names)), meeting=None, seconds=0.0)
    assert [one.name for one in compared(checked)] == ["torch", "clock", "GPUs", "EFA", "network"]


def test_hosts_that_answer_have_reports_and_clocks_and_the_others_a_reason() -> None:
    hosts = [HostSpec(name=name, slots=1, source="test") for name in ("n1", "n2")]
    hosts.append(HostSpec(name="away", slots=1, source="test", python="/no/python"))
    with Survey(hosts, LocalTransport(), python=sys.executable) as survey:
        found = ask_hosts(survey, hosts, paths=["/tmp"], deep=False)
    assert (list(found.reports), list(found.unable)) == (["n1", "n2"], ["away"])
    assert "/no/python" in found.unable["away"].reason
    assert [place["path"] for place in found.reports["n1"]["storage"]["paths"]][-1] == "/tmp"
    # Both are this machine, so its clock is theirs.
    assert all(abs(offset_s) <= doubt_s + 0.1 for offset_s, doubt_s in found.clocks.values())
    assert not any(one.name == "host" for one in found.findings)
    value = found.to_json()
    assert list(value["hosts"]) == ["n1", "n2", "away"]
    assert set(value["hosts"]["away"]) == {"error", "hint"}
