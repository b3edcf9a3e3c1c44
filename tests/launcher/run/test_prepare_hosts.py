"""The hosts of a job before its ranks, with every host on this machine: real surveyors, no ssh."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from dsrun.errors import PreflightError
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.launch.host_placement import Placement
from dsrun.launcher.plan.launch_plan import GpuPlace, LaunchPlan, Program, make_plan
from dsrun.launcher.preflight.findings import Preflight, Requirements
from dsrun.launcher.run.prepare_hosts import HostPreparation, HostSettings, gpu_places, idle_gpus_warning, wants_of
from dsrun.launcher.survey.client import NoAnswer
from support.host_facts import a_host, gpus

#: The one interface that every machine has; unasked nobody would meet there.
HERE = HostSettings(iface="lo")


def host(name: str, **more: object) -> HostSpec:
    return HostSpec(name=name, slots=1, source="hosts:1", **more)  # type: ignore[arg-type]


def plan_of(folder: Path, *hosts: HostSpec, program: Program | None = None, **env: str) -> LaunchPlan:
    (folder / "train.py").write_text("")
    return make_plan(
        Allocation(hosts=hosts),
        program or Program(kind="script", target="train.py", args=(), python=sys.executable),
        job_id="j",
        start="fork",
        cwd=str(folder),
        env=env,
        run_dir=str(folder / "run"),
        grace_s=10.0,
        nonce="n",
    )


class Told:
    """What the user was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []


def prepared(plan: LaunchPlan, settings: HostSettings, told: Told) -> LaunchPlan:
    placement = Placement(
        allocation=Allocation(hosts=tuple(node.host for node in plan.nodes)), local_hosts=frozenset(), transport="local"
    )
    hosts = HostPreparation(placement, settings, lease_s=15, note=told.notes.append, warn=told.warnings.append)
    return hosts.prepare(plan, python=sys.executable)


@pytest.mark.parametrize("preflight", [True, False])
def test_hosts_get_an_address_to_meet_at_and_their_interface_to_it(tmp_path: Path, preflight: bool) -> None:
    told = Told()
    settings = dataclasses.replace(HERE, preflight=preflight)
    plan = prepared(plan_of(tmp_path, host("a"), host("b"), DSRUN_BACKEND="gloo"), settings, told)
    assert plan.master_addr in ("127.0.0.1", "::1")
    assert [node.env["GLOO_SOCKET_IFNAME"] for node in plan.nodes] == ["lo", "lo"]
    reaching, *compared = told.notes
    assert reaching == "reaching 2 hosts"
    assert [note.startswith("preflight: 2 hosts fit (torch ") for note in compared] == [True] * preflight
    # Two names of one machine, which is not what hosts usually are.
    assert len(told.warnings) == (1 if preflight else 0)


def test_what_drivers_of_hosts_told_of_their_gpus_is_handed_on() -> None:
    place = GpuPlace(uuid="GPU-0", address="0000:17:00.0")
    seen = {"a": a_host("a", gpu_places=(place,)), "b": a_host("b"), "c": NoAnswer("no answer")}
    found = Preflight(seen=seen, findings=(), meeting=None, seconds=0.0)
    assert gpu_places(found) == {"a": (place,)}


@pytest.mark.parametrize(
    ("from_scheduler", "slots", "counts", "said"),
    [
        (True, 1, (8, 8), "both hosts have 8 GPUs, and fewer ranks; `dsrun -n 8` takes them all"),
        (True, 2, (2, 4), "b has 4 GPUs, and fewer ranks; `dsrun -n 4` takes them all"),
        (True, 1, (4, 8), "both hosts have 4 to 8 GPUs, and fewer ranks; `dsrun -n 4` takes 4 of each"),
        (True, 8, (8, 8), None),
        (True, 1, (0, 0), None),
        (False, 1, (8, 8), None),
    ],
)
def test_gpus_are_not_left_idle_without_a_word_where_a_scheduler_said_nothing_of_them(
    from_scheduler: bool, slots: int, counts: tuple[int, int], said: str | None
) -> None:
    # `salloc --gres=gpu:8` sets no variable that says so.
    seen = {name: a_host(name, gpus=gpus(count)) for name, count in zip("ab", counts, strict=True)}
    hosts = tuple(HostSpec(name=name, slots=slots, source="Slurm job 7") for name in "ab")
    placement = Placement(
        allocation=Allocation(hosts=hosts),
        local_hosts=frozenset(),
        transport="srun",
        source="Slurm job 7",
        slots_from_scheduler=from_scheduler,
    )
    warning = idle_gpus_warning(placement, Preflight(seen=seen, findings=(), meeting=None, seconds=0.0))
    assert warning == (None if said is None else f"Slurm job 7 does not say here how many GPUs a host has: {said}")


def test_one_host_alone_meets_itself(tmp_path: Path) -> None:
    told = Told()
    plan = prepared(plan_of(tmp_path, host("a")), HostSettings(), told)
    assert (plan.master_addr, plan.nodes[0].env) == ("127.0.0.1", {})
    reaching, compared = told.notes
    assert reaching == "reaching a"
    assert compared.startswith("preflight: 1 host fit")


@pytest.mark.parametrize(
    "settings", [HERE, dataclasses.replace(HERE, preflight=False), dataclasses.replace(HERE, copied_folder="/")]
)
def test_all_hosts_that_cannot_be_reached_are_told_whatever_was_to_be_done(
    tmp_path: Path, settings: HostSettings
) -> None:
    hosts = [host("a"), host("b", python="/no/python"), host("c", python="/no/python")]
    with pytest.raises(PreflightError) as caught:
        prepared(plan_of(tmp_path, *hosts), settings, Told())
    told = caught.value.render()
    assert "b" in told
    assert "c" in told
    assert "/no/python" in told


def test_a_copied_folder_is_there_before_hosts_are_compared(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    plan = plan_of(source, host("a"))
    told = Told()
    settings = dataclasses.replace(HERE, copied_folder=str(source))
    prepared(dataclasses.replace(plan, cwd=str(target)), settings, told)
    assert (target / "train.py").exists()
    assert told.notes[1].startswith("sync: ")


def test_what_is_wanted_of_hosts_follows_from_the_plan(tmp_path: Path) -> None:
    script = plan_of(tmp_path, host("a"))
    folder = str(tmp_path)
    assert wants_of(script, iface="ib0") == Requirements(folder=folder, script="train.py", iface="ib0")
    nccl = wants_of(plan_of(tmp_path, host("a"), NCCL_NET="Socket", OMP_NUM_THREADS="2"), iface=None).nccl
    assert nccl == {"NCCL_NET": "Socket"}
    module = dataclasses.replace(script.program, kind="module", target="pkg.train")
    assert wants_of(
        dataclasses.replace(script, program=module, env={"DSRUN_BACKEND": "nccl"}), iface=None
    ) == Requirements(folder=folder, on_gpus=True)
    program = dataclasses.replace(script.program, kind="command", target="sh")
    assert wants_of(
        dataclasses.replace(script, program=program, env={"DSRUN_BACKEND": "gloo"}), iface=None
    ) == Requirements(folder=folder, is_python=False, on_gpus=False)
