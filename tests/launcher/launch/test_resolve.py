"""What cannot be driven through the command line on every machine; the rest of `resolve` is tested in test_cli.py."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.agent.start.worker import worker_environment
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.jobs.queue.turn import hold_devices
from dsrun.launcher.launch.checked_launch import Backend, Launch, Request
from dsrun.launcher.launch.host_placement import HostRequest, StaticNode
from dsrun.launcher.launch.resolve import check_nccl, demand_of, resolve
from dsrun.launcher.machine.devices.by_rank import gpus_of_ranks
from dsrun.launcher.machine.devices.choice import Demand, DeviceLease
from dsrun.launcher.machine.gpus.left_out import LeftOut
from dsrun.launcher.machine.gpus.read import Gpu, GpuReport
from dsrun.launcher.plan.environment import counted_environ
from dsrun.launcher.plan.launch_plan import GpuPlace
from support.machines import Machine, recorded_machine
from support.topologies import write_tree


def gpu_report(usable: int, reason: str | None = None) -> GpuReport:
    blank = {"uuid": None, "name": None, "memory_total_bytes": None, "memory_free_bytes": None}
    gpus = tuple(Gpu(index=n, compute_capability=None, usable=n < usable, **blank) for n in range(2))  # type: ignore[arg-type]
    places = tuple(GpuPlace(uuid=None, address=None) for _ in gpus)
    return GpuReport(gpus=gpus, usable_count=usable, driver=None, driver_cuda=None, reason=reason, places=places)


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"left_out": (LeftOut(index=2, reason="GPU is lost", is_forbidden=False),)}, "GPU 2 left out: the driver"),
        ({"unlisted": 1}, "a GPU left out: the driver does not list it"),
        ({"slices": ()}, "GPU 1 left out: in MIG mode without slices"),
    ],
)
def test_a_rank_for_each_gpu_is_refused_where_one_of_them_is_left_out(change: dict[str, Any], reason: str) -> None:
    change = dict(change)
    slices = change.pop("slices", None)
    whole = gpu_report(1 if slices is not None else 2)
    report = replace(whole, places=(whole.places[0], replace(whole.places[1], slices=slices)), **change)
    count = report.usable_count
    said = f"hosts:1: {count + 1} ranks, one a GPU, and {count} can be used: {reason}"
    with pytest.raises(UsageError, match=said) as one:
        demand_of([here(count + 1)], report)
    assert one.value.problems[0].hint is not None
    assert one.value.problems[0].hint.startswith(f"`-n {count}` trains on those that are left; ")
    # Where ranks share GPUs anyhow, one less is no reason.
    assert demand_of([here(count + 2)], report) == Demand(ranks=count + 2, gpus=count)


@pytest.mark.parametrize(
    ("visible", "ranks", "demand"),
    [
        # Who names one GPU for two ranks has not meant the others.
        ("0", 2, Demand(ranks=2, gpus=1)),
        # Seven slices and a whole GPU: a device for each of eight ranks.
        (None, 3, Demand(ranks=3, gpus=2)),
        (None, 8, Demand(ranks=8, gpus=2)),
        ("0,1", 3, Demand(ranks=3, gpus=1)),
    ],
)
def test_ranks_that_have_no_use_for_a_gpu_that_is_left_out_are_not_refused(
    folder: Path, visible: str | None, ranks: int, demand: Demand
) -> None:
    machine = recorded_machine("a100_mig", folder / "root")
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    launch = resolved_on(machine, environ=environ, hosts=HostRequest(ranks_per_host=ranks))
    assert launch.demand == demand
    assert any("GPU 1 left out" in warning for warning in launch.warnings) == (visible != "0")


def test_who_named_the_gpu_that_is_left_out_is_refused(folder: Path) -> None:
    machine = recorded_machine("a100_mig", folder / "root")
    with pytest.raises(UsageError, match="2 ranks, one a GPU, and 1 can be used: GPU 1 left out"):
        resolved_on(machine, environ={"CUDA_VISIBLE_DEVICES": "0,1"}, hosts=HostRequest(ranks_per_host=2))
    with pytest.raises(UsageError, match="9 ranks, one a GPU, and 8 can be used: GPU 1 left out"):
        resolved_on(machine, hosts=HostRequest(ranks_per_host=9))


@pytest.mark.parametrize(("visible", "is_told"), [("0,1", False), ("0,3", True), ("2", True), ("0,1,2,3", True)])
def test_a_lost_gpu_is_told_to_jobs_whose_numbers_may_mean_it(folder: Path, visible: str, is_told: bool) -> None:
    # CUDA counts on without it, so that `2` is another GPU now.
    machine = recorded_machine("workstation", folder / "root", lost=[2])
    launch = resolved_on(machine, environ={"CUDA_VISIBLE_DEVICES": visible}, hosts=HostRequest(ranks_per_host=1))
    assert any("GPU 2 left out" in warning for warning in launch.warnings) == is_told
    assert launch.demand.ranks == 1


def test_a_lost_gpu_that_nobody_named_refuses_no_job(folder: Path) -> None:
    machine = recorded_machine("workstation", folder / "root", lost=[3])
    launch = resolved_on(machine, environ={"CUDA_VISIBLE_DEVICES": "0,1"}, hosts=HostRequest(ranks_per_host=3))
    assert launch.demand == Demand(ranks=3, gpus=2)
    assert not any("left out" in warning for warning in launch.warnings)


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
    plan = launch.plan(job_id="j", run_dir="/r", held=DeviceLease())
    # Which devices these are, is for the hosts to say: a scheduler may have named them there.
    assert [node.chosen for node in plan.nodes] == [(0, 1, 2, 3), (2,)]
    assert [worker.env for node in plan.nodes for worker in node.workers] == [{}] * 5
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
    plan = both.plan(job_id="j", run_dir="/r", held=DeviceLease(slices=("MIG-a", "MIG-b")))
    assert [worker.env for node in plan.nodes for worker in node.workers] == [
        {"CUDA_VISIBLE_DEVICES": "MIG-a"},
        {"CUDA_VISIBLE_DEVICES": "MIG-b"},
        {},
    ]
    assert list(both.bindings({})) == ["localhost"]


# drivers that fail, and what a job without GPUs says


def resolved_on(machine: Machine, *, backend: Backend | None = None, no_gpu: bool = False, **changes: Any) -> Launch:
    """A job of the machine's own environment, which `environ` may change."""
    environ = {**machine.environ, **changes.pop("environ", {})}
    request = Request(words=("train.py",), backend=backend, no_gpu=no_gpu, **changes)
    return resolve(request, environ=environ, verbs=[], load_nvml=machine.load_nvml, root=machine.root)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("LibRmVersionMismatch", 8), *((name, None) for name in ("Unknown", "DriverNotLoaded", "LibraryNotFound"))],
)
def test_a_driver_that_fails_is_refused_and_never_a_job_on_the_cpu(folder: Path, name: str, ranks: int | None) -> None:
    machine = recorded_machine("workstation", folder / "root", driver_fails=name)
    with pytest.raises(UsageError, match="the GPUs of this machine cannot be used: ") as caught:
        resolved_on(machine, hosts=HostRequest(ranks_per_host=ranks))
    assert len(caught.value.problems) == 1
    assert str(caught.value.problems[0].hint).endswith("; `--no-gpu` trains on the CPU")


def test_nccl_on_a_driver_that_fails_is_refused_once(folder: Path) -> None:
    machine = recorded_machine("workstation", folder / "root", driver_fails="LibRmVersionMismatch")
    with pytest.raises(UsageError) as caught:
        resolved_on(machine, backend="nccl")
    assert [problem.message for problem in caught.value.problems] == [
        "the GPUs of this machine cannot be used: Driver/library version mismatch: the driver was updated, and the old "
        "kernel module 550.90.07 is still loaded"
    ]


def test_one_of_several_nodes_refuses_its_driver_too(folder: Path) -> None:
    static = StaticNode(node_rank=1, node_count=2, master_addr="node0", master_port=29500)
    machine = recorded_machine("workstation", folder / "root", driver_fails="Unknown")
    with pytest.raises(UsageError, match="the GPUs of this machine cannot be used"):
        resolved_on(machine, hosts=HostRequest(static=static))


@pytest.mark.parametrize(
    "choice",
    [
        {"backend": "gloo"},
        {"no_gpu": True},
        {"environ": {"CUDA_VISIBLE_DEVICES": ""}},
        {"env": ("CUDA_VISIBLE_DEVICES=",)},
    ],
)
def test_a_job_that_is_meant_for_the_cpu_runs_whatever_the_driver_does(folder: Path, choice: dict[str, Any]) -> None:
    machine = recorded_machine("workstation", folder / "root", driver_fails="LibRmVersionMismatch")
    launch = resolved_on(machine, **choice)
    assert (launch.placement.world_size, launch.demand.gpus, launch.warnings) == (1, 0, ())


def test_gpus_that_the_job_names_for_its_ranks_are_those_that_it_counts_and_holds(folder: Path) -> None:
    machine = recorded_machine("workstation", folder / "root")
    launch = resolved_on(machine, environ={"CUDA_VISIBLE_DEVICES": "0,1,2"}, env=("CUDA_VISIBLE_DEVICES=3",))
    assert (launch.placement.world_size, launch.devices, launch.demand.gpus) == (1, "1 GPU", 1)
    environ = counted_environ({**machine.environ, "XDG_STATE_HOME": str(folder)}, launch.env)
    with hold_devices(
        launch.demand,
        environ=environ,
        queue=False,
        priority=0,
        share=False,
        job_id="j",
        note=[].append,
        keep_waiting=lambda: True,
        load_nvml=machine.load_nvml,
    ) as held:
        assert held is not None
        assert held.labels == ("GPU 3",)


@pytest.mark.parametrize("kind", ["lost", "forbidden"])
def test_one_gpu_that_does_not_answer_is_left_out_with_a_warning(folder: Path, kind: str) -> None:
    machine = recorded_machine(
        "workstation", folder / "root", lost=[3] * (kind == "lost"), forbidden=[3] * (kind != "lost")
    )
    launch = resolved_on(machine)
    assert (launch.placement.world_size, launch.devices, launch.demand.gpus) == (3, "3 GPUs", 3)
    told = {
        "lost": "the driver counts it and cannot reach it (GPU is lost); `sudo nvidia-smi -r -i 3` or reboot; look at "
        "power, seat and `dmesg | grep -i nvrm`; exchange it if it comes back",
        "forbidden": "this process may not open it (Insufficient Permissions); `ls -l /dev/nvidia*` shows who may "
        "open it",
    }
    assert f"warning: GPU 3 left out: {told[kind]}" in launch.warnings


def test_a_gpu_that_the_driver_could_not_start_is_said(folder: Path) -> None:
    machine = recorded_machine("workstation", folder / "root")
    write_tree(machine.root, {"dev/nvidia9": ""})
    assert (
        "warning: a GPU left out: the driver does not list it, for it could not start it; `dmesg | grep NVRM` says "
        "why; reboot, and have it serviced if it comes back"
    ) in resolved_on(machine).warnings


def test_a_container_that_was_given_no_gpu_trains_on_the_cpu_and_says_so(folder: Path) -> None:
    machine = recorded_machine("workstation", folder / "root", driver_fails="LibraryNotFound")
    for number in range(4):
        (machine.root / f"dev/nvidia{number}").unlink()
    write_tree(machine.root, {"proc/self/mountinfo": "24 27 0:6 / /dev rw - tmpfs tmpfs rw\n"})
    launch = resolved_on(machine)
    assert (launch.placement.world_size, launch.devices) == (1, "no GPU")
    assert launch.warnings == (
        "warning: the host has 4 NVIDIA GPUs, and this container was given none (`--gpus all`, `nvidia.com/gpu`): "
        "jobs train on the CPU; if that is meant, `--no-gpu` says so",
    )


def test_a_cpu_build_of_torch_beside_gpus_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "torch/version.py": "__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\n",
        "torch-2.9.0.dist-info/METADATA": "Name: torch\nVersion: 2.9.0\n",
    }
    monkeypatch.syspath_prepend(write_tree(folder / "site", files))
    (warning,) = resolved_on(recorded_machine("workstation", folder / "root")).warnings
    assert re.fullmatch(
        r"warning: torch \S+\+cpu is built without CUDA: jobs train on the CPU, and 4 GPUs stay idle; .*", warning
    )


def test_accelerators_of_other_makers_are_refused_by_name_and_gloo_goes_on(folder: Path) -> None:
    machine = recorded_machine("mi300x", folder / "root")
    with pytest.raises(UsageError) as caught:
        resolved_on(machine)
    assert caught.value.render() == (
        "error: this machine has 8 AMD GPUs; dsrun trains on GPUs of NVIDIA, and on CPUs\n"
        "hint: `--backend gloo` trains on the CPU"
    )
    assert resolved_on(machine, backend="gloo").devices == "gloo"


# --no-gpu


def test_no_gpu_hides_gpus_from_all_ranks_of_all_hosts_whatever_else_is_said(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=2 gpus=0,1\nb slots=2 gpus=2,3 env.CUDA_VISIBLE_DEVICES=1\n")
    machine = recorded_machine("workstation", folder / "root")
    launch = resolved_on(
        machine,
        no_gpu=True,
        hosts=HostRequest(hostfile="hosts"),
        env=("CUDA_VISIBLE_DEVICES=3",),
        environ={"DSRUN_BACKEND": "nccl"},
    )
    plan = launch.plan(job_id="j", run_dir="/r", held=DeviceLease())
    ranks = [(node, worker) for node in plan.nodes for worker in node.workers]
    seen = [
        worker_environment({"CUDA_VISIBLE_DEVICES": "0"}, plan, node, worker, address="a", port=1)
        for node, worker in ranks
    ]
    assert [(env["CUDA_VISIBLE_DEVICES"], env["DSRUN_BACKEND"]) for env in seen] == [("", "gloo")] * 4
    assert (launch.demand, launch.devices) == (Demand(ranks=2, gpus=0), "no GPU (--no-gpu)")


def test_no_gpu_is_one_rank_and_takes_the_driver_out_of_it(folder: Path) -> None:
    def load() -> Any:
        raise AssertionError("the driver is not asked")

    machine = replace(recorded_machine("workstation", folder / "root"), load_nvml=load)
    assert resolved_on(machine, no_gpu=True).placement.world_size == 1
    (warning,) = resolved_on(machine, no_gpu=True, for_local=("--share-gpus",)).warnings
    assert warning == "warning: `--share-gpus` has no effect: `--no-gpu` takes none"


def test_no_gpu_and_nccl_exclude_each_other(folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(Request(words=("train.py",), backend="nccl", no_gpu=True))
    assert caught.value.render() == (
        "error: `--no-gpu` and `--backend nccl` cannot be used together: NCCL moves tensors of GPUs\n"
        "hint: leave one of them out"
    )


# which GPUs are meant


def test_ranks_are_bound_by_what_the_driver_told_of_their_gpus(folder: Path) -> None:
    machine = recorded_machine("workstation", folder / "root")
    launch = resolved_on(machine)
    plan = launch.plan(job_id="j", run_dir="/r", held=DeviceLease())
    assert [gpu.address for gpu in plan.nodes[0].gpus] == [gpu.pci_address for gpu in machine.report().gpus]


@pytest.mark.parametrize(
    ("environ", "env", "warned"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, (), True),
        ({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (), False),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ("CUDA_DEVICE_ORDER=PCI_BUS_ID",), False),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, (), False),
        ({}, (), False),
    ],
)
def test_how_numbers_of_unequal_gpus_are_counted_is_said(
    folder: Path, environ: dict[str, str], env: tuple[str, ...], warned: bool
) -> None:
    launch = resolved_on(recorded_machine("desktop", folder / "root"), environ=environ, env=env)
    said = (
        "warning: CUDA_VISIBLE_DEVICES=0 counts by PCI address here, 0: NVIDIA GeForce RTX 4090, "
        "1: NVIDIA GeForce RTX 3090; `CUDA_DEVICE_ORDER=PCI_BUS_ID` says that this is meant"
    )
    assert (said in launch.warnings) is warned
    assert warned or not any("PCI address" in warning for warning in launch.warnings)


def test_numbers_of_unequal_gpus_that_cuda_counts_by_speed_are_refused_and_names_are_not(folder: Path) -> None:
    desktop = recorded_machine("desktop", folder / "root")
    order = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    with pytest.raises(UsageError) as caught:
        resolved_on(desktop, environ={**order, "CUDA_VISIBLE_DEVICES": "1"})
    assert caught.value.render() == (
        "error: `CUDA_DEVICE_ORDER=FASTEST_FIRST` leaves it to CUDA which GPU a number means, and "
        "CUDA_VISIBLE_DEVICES=1 counts 0: NVIDIA GeForce RTX 4090, 1: NVIDIA GeForce RTX 3090\n"
        "hint: `unset CUDA_DEVICE_ORDER` counts by PCI address; or name GPUs in CUDA_VISIBLE_DEVICES as "
        "`nvidia-smi -L` does"
    )
    with pytest.raises(UsageError, match="leaves it to CUDA which GPU a number means, and this machine counts"):
        resolved_on(desktop, environ=order, hosts=HostRequest(include="localhost:1"))
    assert resolved_on(desktop, environ={**order, "CUDA_VISIBLE_DEVICES": "GPU-00000001"}).demand.gpus == 1
    assert resolved_on(desktop, environ=order).demand.gpus == 2
    equal = recorded_machine("workstation", folder / "equal")
    assert resolved_on(equal, environ={**order, "CUDA_VISIBLE_DEVICES": "1"}).demand.gpus == 1


def test_a_task_that_was_shown_one_gpu_has_one_rank_on_it(folder: Path) -> None:
    machine = recorded_machine("dgx_h100", folder / "root")
    # As `--gpus-per-task=1` sets it where no device cgroup hides the others.
    launch = resolved_on(machine, environ={"CUDA_VISIBLE_DEVICES": "5"})
    assert (launch.placement.world_size, launch.demand) == (1, Demand(ranks=1, gpus=1))
    (gpu,) = gpus_of_ranks(launch.gpus, [{"CUDA_VISIBLE_DEVICES": "5"}])
    assert gpu is not None
    assert gpu.address == machine.report().gpus[5].pci_address


def test_a_driver_that_was_asked_stays_open_for_who_keeps_it(folder: Path) -> None:
    machine = recorded_machine("workstation", folder / "root")
    nvml = machine.load_nvml()
    users = [0]

    def count(change: int) -> None:
        users[0] += change

    nvml.nvmlInit, nvml.nvmlShutdown = (lambda: count(1)), (lambda: count(-1))
    kept = replace(machine, load_nvml=lambda: nvml)
    with ExitStack() as keep:
        resolve(Request(words=("train.py",)), environ={}, verbs=[], load_nvml=kept.load_nvml, root=kept.root, keep=keep)
        assert users == [1]
    assert users == [0]


def test_whether_the_optimizer_steps_on_the_host_follows_from_the_config(folder: Path) -> None:
    batch = '"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
    (folder / "there.json").write_text(
        f'{{{batch}, "zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}}}}}'
    )
    (folder / "here.json").write_text(f'{{{batch}, "zero_optimization": {{"stage": 2}}}}')
    found = {
        name: resolved(Request(words=("train.py",), config=name)).plan(job_id="j", run_dir="/r").steps_on_host
        for name in ("there.json", "here.json")
    }
    assert found == {"there.json": True, "here.json": False}


@pytest.mark.parametrize(("env", "warned"), [((), True), (("OMP_NUM_THREADS",), False)])
def test_threads_of_this_login_that_go_to_other_hosts_are_said(
    folder: Path, env: tuple[str, ...], warned: bool
) -> None:
    (folder / "hosts").write_text("w1 slots=4\n")
    launch = resolved(Request(words=("train.py",), hosts=HostRequest(hostfile="hosts"), env=env), OMP_NUM_THREADS="1")
    said = (
        "warning: OMP_NUM_THREADS=1 of the environment here goes to the ranks of all hosts; `unset OMP_NUM_THREADS` "
        "gives each its share of the cores, `--env OMP_NUM_THREADS` says that this is meant"
    )
    assert launch.warnings == ((said,) if warned else ())
    assert launch.env["OMP_NUM_THREADS"] == "1"
    assert not any("OMP" in warning for warning in resolved(Request(words=("train.py",)), OMP_NUM_THREADS="1").warnings)
