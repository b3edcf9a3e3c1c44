"""What cannot be driven through the command line on every machine; the rest of `resolve` is tested in test_cli.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.devices import Demand, Held
from dsrun.launcher.hosts import Allocation, HostSpec
from dsrun.launcher.launch import Launch, Request
from dsrun.launcher.placement import HostRequest
from dsrun.launcher.probe_gpu import Gpu, GpuReport
from dsrun.launcher.resolve import check_nccl, demand_of, resolve, slice_warnings


def gpu_report(usable: int, reason: str | None = None) -> GpuReport:
    blank = {"uuid": None, "name": None, "memory_total_bytes": None, "memory_free_bytes": None}
    gpus = tuple(Gpu(index=n, compute_capability=None, usable=n < usable, **blank) for n in range(2))  # type: ignore[arg-type]
    return GpuReport(gpus=gpus, usable_count=usable, driver=None, driver_cuda=None, reason=reason)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (gpu_report(0, "no NVIDIA driver"), "no NVIDIA driver"),
        (gpu_report(0), "CUDA_VISIBLE_DEVICES hides all of them"),
    ],
)
def test_nccl_without_a_gpu_is_refused_with_the_reason(report: GpuReport, reason: str) -> None:
    hosts = [HostSpec(name="localhost", slots=1, source="this machine")]
    with pytest.raises(UsageError) as caught:
        check_nccl(report, hosts, torch="2.13.0+cu128", cuda="12.8")
    assert caught.value.render() == (
        f"error: `--backend nccl` needs a GPU and this machine offers none: {reason}\n"
        "hint: `--backend gloo` trains on the CPU"
    )


def test_nccl_needs_a_cuda_build_and_a_gpu_for_each_rank() -> None:
    hosts = [HostSpec(name="localhost", slots=3, source="this machine")]
    with pytest.raises(UsageError, match=r"needs CUDA and torch 2\.13\.0\+cpu is built without it"):
        check_nccl(gpu_report(2), hosts, torch="2.13.0+cpu", cuda=None)
    with pytest.raises(UsageError, match="needs a GPU for each rank; 3 ranks share 2"):
        check_nccl(gpu_report(2), hosts, torch="2.13.0+cu128", cuda="12.8")


def test_several_slices_come_with_a_warning_and_one_without() -> None:
    assert slice_warnings(replace(gpu_report(1), slice_count=1)) == ()
    (warning,) = slice_warnings(replace(gpu_report(2), slice_count=2))
    assert warning.startswith("warning: CUDA_VISIBLE_DEVICES names 2 MIG slices: each rank sees its own as cuda:0")


def here(slots: int, gpus: tuple[int, ...] | None = None, name: str = "localhost") -> HostSpec:
    return HostSpec(name=name, slots=slots, source="hosts:1", gpus=gpus)


def test_this_machine_is_asked_for_what_its_own_ranks_need() -> None:
    two = gpu_report(2)
    assert demand_of([here(3)], two) == Demand(ranks=3, gpus=2)
    assert demand_of([here(1, (1,))], two) == Demand(ranks=1, gpus=1, chosen=(1,))
    assert demand_of([here(4, (0, 1, 2, 3))], gpu_report(0)) == Demand(ranks=4, gpus=0)
    assert (
        demand_of([here(2, (0, 1))], None) == demand_of([here(1), here(1, name="b")], None) == Demand(ranks=2, gpus=0)
    )
    assert demand_of([], two) == Demand(ranks=0, gpus=0)


def test_gpus_that_this_machine_does_not_show_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        demand_of([here(2, (1, 4))], gpu_report(2))
    assert caught.value.render() == (
        "error: hosts:1: GPU 4 is asked for, and this process sees GPUs 0 to 1\n"
        "hint: ids count the GPUs that CUDA_VISIBLE_DEVICES names; `dsrun probe` shows them"
    )
    with pytest.raises(
        UsageError, match="`--transport local` makes 2 hosts of this machine, which has one set of GPUs"
    ):
        demand_of([here(1), here(1, name="b")], gpu_report(2))


# the whole, on a machine that shows no GPU


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    (tmp_path / "train.sh").chmod(0o755)
    return tmp_path


def resolved(request: Request, **environ: str) -> Launch:
    return resolve(request, environ={"CUDA_VISIBLE_DEVICES": "", **environ}, verbs=[])


@pytest.mark.parametrize(("word", "kind", "start"), [("train.py", "script", "fork"), ("train.sh", "command", "exec")])
def test_kind_and_start_follow_from_the_file(folder: Path, word: str, kind: str, start: str) -> None:
    plan = resolved(Request(words=(word,))).plan(job_id="j", run_dir="/r")
    assert (plan.program.kind, plan.start) == (kind, start)


def test_forking_a_shell_script_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"`--start fork` cannot fork \./train\.sh: it is a sh script, not Python"):
        resolved(Request(words=("train.sh",), start="fork"))


def test_binding_and_restarts_reach_the_plan_and_threads_are_left_to_the_host(folder: Path) -> None:
    launch = resolved(Request(words=("train.py",), bind="cores", max_restarts=3))
    plan = launch.plan(job_id="j", run_dir="/r")
    assert (plan.bind, plan.max_restarts, plan.env, plan.nodes[0].workers[0].env) == ("cores", 3, {}, {})


def test_the_backend_of_the_environment_is_taken_and_checked_as_the_flag_is(folder: Path) -> None:
    launch = resolved(Request(words=("train.py",)), DSRUN_BACKEND="gloo")
    assert (launch.devices, launch.env) == ("gloo", {"DSRUN_BACKEND": "gloo"})
    assert resolved(Request(words=("train.py",)), DSRUN_BACKEND="").env == {}
    assert resolved(Request(words=("train.py",), backend="gloo"), DSRUN_BACKEND="mpi").env == {"DSRUN_BACKEND": "gloo"}
    with pytest.raises(UsageError) as caught:
        resolved(Request(words=("train.py",)), DSRUN_BACKEND="mpi")
    assert caught.value.render() == (
        "error: `DSRUN_BACKEND` in the environment is `mpi`; expected nccl or gloo\n"
        "hint: `unset DSRUN_BACKEND`, or use `--backend`"
    )
    with pytest.raises(UsageError, match="`DSRUN_BACKEND=nccl` needs a GPU and this machine offers none"):
        resolved(Request(words=("train.py",)), DSRUN_BACKEND="nccl")


def test_bindings_of_this_machine_are_shown_with_the_users_threads(folder: Path) -> None:
    launch = resolved(Request(words=("train.py",), hosts=HostRequest(ranks_per_host=2), bind="none"))
    bindings = launch.bindings({"OMP_NUM_THREADS": "7,2"})
    assert {name: [one.threads for one in found] for name, found in bindings.items()} == {"localhost": [7, 7]}
    assert all(one.threads >= 1 for one in launch.bindings({})["localhost"])


def test_gpus_of_this_machine_can_be_chosen_without_a_hostfile(folder: Path) -> None:
    launch = resolved(Request(words=("train.py",), hosts=HostRequest(include="localhost:0")))
    assert (launch.allocation.world_size, launch.demand) == (1, Demand(ranks=1, gpus=0))


def test_other_hosts_are_told_their_gpus_and_ask_nothing_of_this_machine(folder: Path) -> None:
    (folder / "hosts").write_text("w1 slots=4\nw2 slots=4\n")
    # NCCL is no question to this machine, which has no GPU.
    launch = resolved(
        Request(words=("train.py",), backend="nccl", hosts=HostRequest(hostfile="hosts", include="w1@w2:2"))
    )
    assert (launch.demand, launch.devices) == (Demand(ranks=0, gpus=0), "nccl")
    plan = launch.plan(job_id="j", run_dir="/r", held=Held())
    seen = [worker.env["CUDA_VISIBLE_DEVICES"] for node in plan.nodes for worker in node.workers]
    assert seen == ["0,1,2,3"] * 4 + ["2"]
    assert launch.reached() == {"w1": "ssh w1", "w2": "ssh w2"}


def test_programs_and_modules_of_other_hosts_need_not_be_here_and_scripts_do(folder: Path) -> None:
    (folder / "hosts").write_text("w1 slots=1\n")
    there = HostRequest(hostfile="hosts")
    assert resolved(Request(kind="command", words=("no-such-tool",), hosts=there)).program.target == "no-such-tool"
    assert resolved(Request(kind="module", words=("no_such.mod",), hosts=there)).program.target == "no_such.mod"
    with pytest.raises(UsageError, match=r"script tran\.py: no such file"):
        resolved(Request(words=("tran.py",), hosts=there))
    with pytest.raises(UsageError, match="there is no such program"):
        resolved(Request(kind="command", words=("no-such-tool",)))


def test_what_is_held_reaches_the_ranks_of_this_machine_only(folder: Path) -> None:
    launch = resolved(Request(words=("train.py",), hosts=HostRequest(ranks_per_host=2)))
    assert launch.demand == Demand(ranks=2, gpus=0)
    there = HostSpec(name="elsewhere", slots=1, source="hosts:2")
    placement = replace(launch.placement, allocation=Allocation(hosts=(*launch.allocation.hosts, there)))
    both = replace(launch, placement=placement)
    plan = both.plan(job_id="j", run_dir="/r", held=Held(slices=("MIG-a", "MIG-b")))
    assert [worker.env for node in plan.nodes for worker in node.workers] == [
        {"CUDA_VISIBLE_DEVICES": "MIG-a"},
        {"CUDA_VISIBLE_DEVICES": "MIG-b"},
        {},
    ]
    assert list(both.bindings({})) == ["localhost"]
