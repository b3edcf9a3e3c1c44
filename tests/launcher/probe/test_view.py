"""What a person sees of one host, and of many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from dsrun.launcher.machine.verdicts.all import judge
from dsrun.launcher.preflight.findings import Finding
from dsrun.launcher.probe.many_hosts import ManyReports
from dsrun.launcher.probe.view import host_view, hosts_view
from dsrun.launcher.survey.client import NoAnswer
from support.machines import recorded_machine


def test_a_machine_of_gpus_has_its_matrix_and_cards_on_request(tmp_path: Path) -> None:
    report = recorded_machine("dgx_h100", tmp_path).report().to_json()
    usual = [click.unstyle(line) for line in host_view(report, width=80, everything=False)]
    (heading,) = [line for line in usual if line.startswith(" ") and line.lstrip().startswith("GPU0")]
    assert heading.split()[:9] == [*(f"GPU{index}" for index in range(8)), "CPU"]
    assert usual[usual.index(heading) + 1].split()[:3] == ["GPU0", "X", "NV18"]
    everything = [click.unstyle(line) for line in host_view(report, width=80, everything=True)]
    assert any("NIC11" in line.split() for line in everything)
    # All but the matrix keeps to the terminal.
    matrix = {line for line in usual if line.startswith(("GPU", " "))}
    assert all(len(line) <= 80 for line in usual if line not in matrix)


def test_many_hosts_stand_with_their_differences_and_what_is_wrong(tmp_path: Path) -> None:
    reports = {
        name: recorded_machine("workstation", tmp_path / name).report().to_json() for name in ("n1", "n2", "n3", "n4")
    }
    reports["n3"]["versions"]["torch"] = "2.11.0"
    finding = Finding(
        verdict="red", name="torch", text="2.13.0 on 3 hosts, 2.11.0 on n3", hosts=("n3",), fix="`pip install`"
    )
    found = ManyReports(
        hosts=("n1", "n2", "n3", "n4", "away"),
        reports=reports,
        unable={"away": NoAnswer("connection refused", "is sshd running?")},
        findings=(finding,),
        clocks={name: (0.001 * index, 0.0004) for index, name in enumerate(reports)},
    )
    text = "\n".join(click.unstyle(line) for line in hosts_view(found, width=80, everything=False))
    assert text.startswith("all 4 hosts\n")
    assert "clock      +0.0 ms ± 0.4 (n1) to +3.0 ms ± 0.4 (n4)" in text
    assert "! 2.11.0" in text
    assert "n[1-2,4]" in text
    assert "red    torch: 2.13.0 on 3 hosts, 2.11.0 on n3\n       fix: `pip install`" in text
    # What each of them has wrong is told once.
    assert text.count(": clocks stay low") == 1
    told = found.to_json()
    assert list(told["hosts"]) == ["n1", "n2", "n3", "n4", "away"]
    assert told["hosts"]["away"] == {"error": "connection refused", "hint": "is sshd running?"}
    assert told["clocks"]["n4"] == {"offset_s": 0.003, "doubt_s": 0.0004}


def test_what_a_finding_says_of_a_host_is_not_said_again_by_the_host(tmp_path: Path) -> None:
    report = replace(recorded_machine("aws_p5", tmp_path).report(), nccl_net_plugin=None)
    report = replace(report, verdicts=judge(report))
    (own,) = [one for one in report.verdicts if "EFA devices" in one.text]
    finding = Finding(
        verdict="amber", name="EFA", text=f"n1 and n2: {own.text}", hosts=("n1", "n2"), fix="install the plugin"
    )
    found = ManyReports(
        hosts=("n1", "n2", "n3"),
        reports={name: report.to_json() for name in ("n1", "n2", "n3")},
        unable={},
        findings=(finding,),
        clocks={},
    )
    text = "\n".join(click.unstyle(line) for line in hosts_view(found, width=400, everything=True))
    assert f"amber  EFA: n1 and n2: {own.text}" in text
    # Only of the third host, of which the finding says nothing.
    assert [line for line in text.splitlines() if own.text in line and "amber" not in line] == [
        f"note   n3: {own.text}"
    ]
