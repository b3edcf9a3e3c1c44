from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.launch.plan_text import describe_plan
from dsrun.launcher.plan.launch_plan import GpuPlace, LaunchPlan, Outside, Program, make_plan


def plan(*slots: int, args: tuple[str, ...] = (), env: dict[str, str] | None = None) -> LaunchPlan:
    hosts = tuple(HostSpec(name=f"w{index}", slots=count, source=f"hosts:{index}") for index, count in enumerate(slots))
    return make_plan(
        Allocation(hosts=hosts),
        Program(kind="script", target="train.py", args=args, python="/usr/bin/python3"),
        job_id="20261121-0733-x7k2",
        start="fork",
        cwd="/work",
        env=env or {},
        run_dir="/logs/20261121-0733-x7k2",
        grace_s=10.0,
        nonce="test-nonce",
        worker_env={"w0": {"OMP_NUM_THREADS": "2"}},
    )


@pytest.mark.parametrize("slots", [(1,), (2,), (2, 3), (1, 1, 4)])
def test_ranks_are_numbered_host_by_host_without_gaps(slots: tuple[int, ...]) -> None:
    nodes = plan(*slots).nodes
    assert [worker.rank for node in nodes for worker in node.workers] == list(range(sum(slots)))
    assert [[worker.local_rank for worker in node.workers] for node in nodes] == [list(range(n)) for n in slots]


def test_a_worker_knows_its_place_once_the_rendezvous_is_known() -> None:
    whole = plan(2, 3)
    node = whole.nodes[1]
    place = whole.rank_info(node.workers[2], node, address="10.0.0.1", port=4711, agent_store=True)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (4, 5, 2, 3)
    assert (place.node_rank, place.node_count, place.master_addr, place.master_port) == (1, 2, "10.0.0.1", 4711)


def test_ranks_and_hosts_are_numbered_over_those_that_have_a_dsrun_of_their_own() -> None:
    outside = Outside(node_rank=2, node_count=4, port=29500)
    whole = make_plan(
        Allocation(hosts=(HostSpec(name="w2", slots=3, source="here"),)),
        plan(1).program,
        job_id="j",
        start="fork",
        cwd="/",
        env={},
        run_dir="/r",
        grace_s=1,
        nonce="n",
        outside=outside,
    )
    assert (whole.ranks, whole.world_size) == (range(6, 9), 12)
    assert whole.rank_hosts == ["elsewhere"] * 6 + ["w2"] * 3 + ["elsewhere"] * 3
    node = whole.nodes[0]
    place = whole.rank_info(node.workers[1], node, address="h", port=1, agent_store=True)
    assert (place.rank, place.local_rank, place.local_world_size) == (7, 1, 3)
    assert (place.world_size, place.node_rank, place.node_count) == (12, 2, 4)
    assert LaunchPlan.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_variables_of_one_host_stay_on_that_host() -> None:
    whole = plan(1, 1)
    assert [node.workers[0].env for node in whole.nodes] == [{"OMP_NUM_THREADS": "2"}, {}]


def test_what_was_found_out_about_hosts_is_part_of_the_plan() -> None:
    whole = plan(1, 1).at("10.0.0.1", {"w0": {"A": "1"}}).at("10.0.0.2", {"w0": {"B": "2"}, "w9": {"C": "3"}})
    assert whole.master_addr == "10.0.0.2"
    assert [node.env for node in whole.nodes] == [{"A": "1", "B": "2"}, {}]
    assert [node.workers for node in whole.nodes] == [node.workers for node in plan(1, 1).nodes]
    assert LaunchPlan.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_gpus_of_hosts_and_what_was_chosen_of_them_survive_json() -> None:
    cut = GpuPlace(uuid="GPU-a", address="0000:17:00.0", slices=("MIG-a", "MIG-b"))
    whole = plan(1, 1).with_gpus({"w1": (cut, GpuPlace(uuid=None, address=None))})
    whole = replace(whole, nodes=(replace(whole.nodes[0], chosen=(3,)), whole.nodes[1]), steps_on_host=True)
    assert [node.gpus[:1] for node in whole.nodes] == [(), (cut,)]
    assert LaunchPlan.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_a_plan_survives_json_with_any_word() -> None:
    whole = plan(2, 1, args=("a b", "", "\n", "ä", "\udcff"), env={"A": "\udcfe=$x"})
    assert LaunchPlan.from_json(json.loads(json.dumps(whole.to_json()))) == whole


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("script", ["py", "-u", "x", "--a"]),
        ("module", ["py", "-u", "-m", "x", "--a"]),
        ("command", ["x", "--a"]),
    ],
)
def test_a_program_is_what_one_would_type(kind: str, words: list[str]) -> None:
    assert Program(kind=kind, target="x", args=("--a",), python="py").words() == words  # type: ignore[arg-type]


def test_the_plan_for_people_can_be_pasted_and_keeps_secrets() -> None:
    shown = describe_plan(plan(2, 1, args=("--name", "a b"), env={"HF_TOKEN": "s3cret", "B": "$x"}))
    assert shown == (
        "job        20261121-0733-x7k2\n"
        "command    /usr/bin/python3 -u train.py --name 'a b'\n"
        "folder     /work\n"
        "start      fork\n"
        "logs       /logs/20261121-0733-x7k2\n"
        "grace      10s between asking and killing\n"
        "ranks      0-1 on w0 (hosts:0)\n"
        "           2 on w1 (hosts:1)\n"
        "variables  B='$x'\n"
        "           HF_TOKEN=***\n"
        "           OMP_NUM_THREADS=2 on w0"
    )
