"""A preflight reads as one line where all is well, and as a table of what is not; its JSON form has everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsrun.launcher.preflight.findings import Finding, Preflight, Requirements
from dsrun.launcher.preflight.rules import judge
from dsrun.launcher.preflight.text import describe, preflight_json, summary
from dsrun.launcher.rendezvous.address import RendezvousAddress
from dsrun.launcher.survey.client import NoAnswer
from support.host_facts import GIB, cluster, gpus, rdma, script, specs

TORCH = Finding(
    verdict="red", name="torch", text="2.13.0 on 15 hosts, 2.11.0 on n7", hosts=("n7",), fix="`pip install` on n7"
)
NETWORK = Finding(
    verdict="red", name="network", text="host n1: no\n  10.0.0.1: no answer", hosts=("n1",), fix="--iface"
)
MEMORY = Finding(verdict="amber", name="memory", text="1 GiB on n2", hosts=("n2",), fix="look")


def preflight(*findings: Finding, count: int = 16) -> Preflight:
    seen = cluster(count, torch="2.13.0", gpus=gpus(8), **rdma(0))
    return Preflight(seen=seen, findings=findings, meeting=RendezvousAddress("10.0.0.1", {"n1": "eth0"}), seconds=1.23)


def test_hosts_that_are_alike_are_one_line() -> None:
    assert describe(preflight()) == ["preflight: 16 hosts alike (torch 2.13.0, 8 x H100) in 1.2s"]
    assert summary(preflight(count=1)) == "preflight: 1 host fit (torch 2.13.0, 8 x H100) in 1.2s"


def test_a_warning_and_a_refusal_are_told_apart_in_the_first_line() -> None:
    assert summary(preflight(MEMORY)).startswith("preflight: 16 hosts fit, not all alike (torch 2.13.0")
    everywhere = Finding(verdict="amber", name="disk", text="full", hosts=("n1", "n2"), fix="make room")
    assert summary(preflight(everywhere, count=2)).startswith("preflight: 2 hosts fit (torch 2.13.0")
    assert summary(preflight(TORCH, MEMORY)) == "preflight: 1 problem on 1 of 16 hosts, in 1.2s"
    assert summary(preflight(TORCH, NETWORK)) == "preflight: 2 problems on 2 of 16 hosts, in 1.2s"
    assert summary(preflight(TORCH, count=1)) == "preflight: 1 problem, in 1.2s"


def test_findings_are_rows_with_their_fix_below() -> None:
    assert describe(preflight(TORCH, NETWORK, MEMORY))[1:] == [
        "red    torch    2.13.0 on 15 hosts, 2.11.0 on n7",
        "                fix: `pip install` on n7",
        "red    network  host n1: no",
        "                  10.0.0.1: no answer",
        "                fix: --iface",
        "amber  memory   1 GiB on n2",
        "                fix: look",
    ]
    assert describe(preflight(TORCH), colour=True)[1].startswith("\x1b[31mred  \x1b[0m  torch")


def test_the_json_form_has_facts_findings_and_who_did_not_answer() -> None:
    made = preflight(TORCH, count=2)
    silent = Preflight(
        seen={**made.seen, "n3": NoAnswer("refused", "start sshd")}, findings=(TORCH,), meeting=None, seconds=1
    )
    value = json.loads(json.dumps(preflight_json(silent)))
    assert (value["schema_version"], value["ok"], value["meeting"]) == (1, False, None)
    assert value["findings"][0]["hosts"] == ["n7"]
    assert value["hosts"][0]["facts"]["versions"]["torch"] == "2.13.0"
    facts = value["hosts"][0]["facts"]
    sizes = {name: facts[name] for name in ("memory_bytes", "shm_bytes", "shm_free_bytes", "memlock_bytes", "nofile")}
    assert sizes == {
        "memory_bytes": 512 * GIB,
        "shm_bytes": 256 * GIB,
        "shm_free_bytes": 256 * GIB,
        "memlock_bytes": None,
        "nofile": 65536,
    }
    assert facts["no_gpus_fix"] is None
    assert (len(facts["gpus"]), facts["gpus"][1]) == (
        8,
        {
            "index": 1,
            "label": "GPU 1",
            "model": "H100",
            "total_bytes": 80 * GIB,
            "free_bytes": 79 * GIB,
            "used_by": [],
            "compute_capability": None,
        },
    )
    assert facts["rdma"][0] == {"card": "mlx5_0", "kind": "InfiniBand", "rate_gbit": 400, "gid_index": 0}
    assert not facts.keys() & {"code", "memory", "limits", "gpus_unusable", "net_plugin", "net_variables"}
    assert value["hosts"][2] == {"name": "n3", "answered": False, "reason": "refused", "hint": "start sshd"}
    assert preflight_json(preflight())["meeting"] == {
        "address": "10.0.0.1",
        "interfaces": {"n1": "eth0"},
        "rails": {},
        "reason": "",
    }


def test_the_guides_table_is_what_such_hosts_show() -> None:
    held = gpus(8, used_by={2: "pid 4242 of user bob"}, free_of={2: 19})
    odd: dict[str, dict[str, Any]] = {
        "n3": {"files": script(digest=None, fault="/data/train.py: no such file or directory")},
        "n5": {"gpus": held},
        "n7": {"torch": "2.11.0"},
        "n9": {"memlock_bytes": 65536},
        "n14": rdma(*[0] * 7),
    }
    common: dict[str, Any] = {**rdma(*[0] * 8), "torch": "2.13.0", "gpus": gpus(8)}
    seen = {
        **cluster(16, odd, files=script(), **common),
        "n12": NoAnswer("connection refused", "is sshd running?", unreached=True),
    }
    found = judge(specs(16, slots=8), seen, Requirements(on_gpus=True))
    shown = describe(Preflight(seen=seen, findings=tuple(found), meeting=None, seconds=1.23))
    guide = Path(__file__).parents[3] / "docs" / "guides" / "preflight.md"
    assert "\n".join(["```", *shown, "```"]) in guide.read_text()
    alike = Preflight(seen=cluster(16, **common), findings=(), meeting=None, seconds=1.23)
    assert f"dsrun: {summary(alike)}\n" in guide.read_text()
