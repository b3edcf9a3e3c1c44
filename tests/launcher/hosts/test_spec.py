from __future__ import annotations

import json

import pytest

from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan

FULL = HostSpec(
    name="[::1]",
    slots=2,
    source="hosts:1",
    port=2222,
    user="ada",
    addr="fd00::7",
    python="/opt/my env/bin/python",
    gpus=(0, 3),
    env={"NCCL_SOCKET_IFNAME": "eth1", "TEXT": 'two\nlines "quoted"'},
)


def plan(*hosts: HostSpec) -> LaunchPlan:
    return make_plan(
        Allocation(hosts=hosts),
        Program(kind="script", target="train.py", args=(), python="python"),
        job_id="job",
        start="fork",
        cwd="/",
        env={},
        run_dir="/run",
        grace_s=1.0,
        nonce="nonce",
    )


def test_a_host_with_everything_survives_the_plan_as_json() -> None:
    before = plan(FULL, HostSpec(name="bare", slots=1, source="hosts:2"))
    after = LaunchPlan.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    assert after.nodes[0].host == FULL
    assert after.nodes[0].host.gpus == (0, 3)


def test_a_plan_written_before_hosts_could_say_more_is_still_read() -> None:
    assert HostSpec(**json.loads('{"name": "w", "slots": 2, "source": "hosts:1"}')).gpus is None


def test_hosts_can_be_counted_in_sets_although_their_variables_cannot() -> None:
    assert len({FULL, HostSpec(name="[::1]", slots=2, source="hosts:1")}) == 2


def test_slots_are_called_by_their_gpus_or_counted_from_zero() -> None:
    assert FULL.slot_ids == (0, 3)
    assert HostSpec(name="w", slots=3, source="hosts:1").slot_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("name", "addr", "address"), [("w0", None, "w0"), ("[::1]", None, "::1"), ("::1", None, "::1"), ("w", "h", "h")]
)
def test_address_is_what_a_connection_takes(name: str, addr: str | None, address: str) -> None:
    assert HostSpec(name=name, slots=1, source="hosts:1", addr=addr).address == address
