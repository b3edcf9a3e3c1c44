from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.environment import JOB_ID_ENV
from dsrun.launcher.machine.gpus.read import Gpu
from dsrun.launcher.machine.limits import LimitsReport
from dsrun.launcher.machine.memory import MemoryReport
from dsrun.launcher.machine.read import ProbeReport, probe
from dsrun.launcher.preflight.doctor import (
    Finding,
    Verdict,
    check_clock,
    check_crashed_jobs,
    check_gpus,
    check_locked_memory,
    check_open_files,
    check_shared_memory,
    check_ssh,
    check_state_folder,
    check_torch,
    check_trial,
    is_well,
    processes_by_job,
    to_json,
)
from support.cli import clean_environment
from support.job_records import NOW, leave_job
from support.machines import recorded_machine

GPU = Gpu(
    index=0,
    uuid="GPU-1",
    name="H200",
    memory_total_bytes=1,
    memory_free_bytes=1,
    compute_capability="9.0",
    usable=True,
)


def report(
    *, torch: str | None, cuda: str | None, gpus: int, driver_cuda: str | None = "13.0", libcuda: str | None = None
) -> ProbeReport:
    here = probe(environ={"CUDA_VISIBLE_DEVICES": ""})
    versions = dataclasses.replace(here.versions, torch=torch, cuda=cuda, libcuda=libcuda)
    return dataclasses.replace(
        here, versions=versions, gpus=(GPU,) * gpus, driver="580.1", driver_cuda=driver_cuda, gpus_usable=gpus
    )


@pytest.mark.parametrize(
    ("torch", "cuda", "gpus", "driver_cuda", "verdicts"),
    [
        (None, None, 0, None, ["red"]),
        ("2.13.0+cpu", None, 0, None, ["green", "green"]),
        ("2.13.0+cpu", None, 8, "13.0", ["green", "amber"]),
        ("2.13.0+cu130", "13.0", 8, "13.1", ["green", "green"]),
        ("2.13.0+cu130", "13.1", 8, "13.0", ["green", "green"]),
        ("2.13.0+cu130", "13.0", 8, "12.8", ["green", "red"]),
        ("2.13.0+cu130", "13.0", 8, None, ["green", "green"]),
    ],
)
def test_torch_must_be_there_and_the_driver_able_to_run_it(
    torch: str | None, cuda: str | None, gpus: int, driver_cuda: str | None, verdicts: list[Verdict]
) -> None:
    found = check_torch(report(torch=torch, cuda=cuda, gpus=gpus, driver_cuda=driver_cuda))
    assert [finding.verdict for finding in found] == verdicts
    assert all((finding.fix is None) == (finding.verdict == "green") for finding in found)


def test_a_driver_that_fails_is_never_a_machine_without_gpus(tmp_path: Path) -> None:
    torch = {"torch": "2.13.0+cu130", "cuda": "13.0"}
    broken = recorded_machine("dgx_h100", tmp_path / "broken", driver_fails="LibRmVersionMismatch").report()
    versions = dataclasses.replace(broken.versions, **torch)
    (_, cuda) = check_torch(dataclasses.replace(broken, versions=versions))
    assert cuda.verdict == "red"
    assert "Driver/library version mismatch" in cuda.text
    assert cuda.fix
    foreign = recorded_machine("mi300x", tmp_path / "foreign").report()
    (_, cuda) = check_torch(dataclasses.replace(foreign, versions=versions))
    assert (cuda.verdict, cuda.text.split(";")[0]) == ("red", "this machine has 8 AMD GPUs")
    idle = dataclasses.replace(foreign, versions=versions, gpus_unusable=None, gpus_idle="this machine has a GPU")
    assert [finding.verdict for finding in check_torch(idle)] == ["green", "amber"]
    hidden = report(**torch, gpus=2)
    (_, cuda) = check_torch(dataclasses.replace(hidden, gpus_usable=0))
    assert (cuda.verdict, cuda.text) == ("amber", "CUDA_VISIBLE_DEVICES hides every GPU from jobs")


def test_what_is_wrong_with_gpus_is_said_the_worst_first(tmp_path: Path) -> None:
    server = recorded_machine("l40s_pcie", tmp_path / "l40s").report()
    (found,) = check_gpus(server)
    assert (found.verdict, found.name) == ("red", "GPUs")
    assert found.text == (
        "GPU 6 Xid 79: fell off the bus (10 d ago); GPU 7 with 3 uncorrected memory errors (and 4 more: `dsrun probe`)"
    )
    fabric = recorded_machine("dgx_a100", tmp_path / "a100", fault="no fabric manager").report()
    (found,) = check_gpus(fabric)
    assert (found.verdict, found.text) == ("red", "6 NVSwitches and no NVLink up: CUDA does not start (error 802)")
    well = recorded_machine("dgx_h100", tmp_path / "h100").report()
    assert [(found.verdict, found.text) for found in check_gpus(well)] == [("green", "8 GPUs")]
    assert check_gpus(dataclasses.replace(well, gpus=())) == []


def test_a_newer_libcuda_before_the_drivers_own_is_as_it_should_be() -> None:
    """NGC's images on an older driver of a data centre GPU."""
    found = check_torch(report(torch="2.13.0+cu140", cuda="14.0", gpus=8, driver_cuda="13.0", libcuda="700.10"))
    assert [finding.verdict for finding in found] == ["green", "green"]
    assert found[1].text.endswith("libcuda 700.10 runs it on driver 580.1 (forward compatibility)")


GIB = 1 << 30


def shared_memory(size: int | None, *, free: int | None = None) -> MemoryReport:
    nothing: dict[str, Any] = dict.fromkeys(MemoryReport.__dataclass_fields__)
    return MemoryReport(**{**nothing, "shm_total_bytes": size, "shm_free_bytes": free})


def limits(**values: int | None) -> LimitsReport:
    nothing: dict[str, Any] = dict.fromkeys(LimitsReport.__dataclass_fields__)
    return LimitsReport(**{**nothing, **values})


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (check_shared_memory(shared_memory(None)), "red"),
        (check_shared_memory(shared_memory(64 << 20)), "amber"),
        (check_shared_memory(shared_memory(8 * GIB)), "green"),
        (check_shared_memory(shared_memory(8 * GIB, free=0)), "amber"),
        (check_locked_memory(limits(memlock_bytes=None), has_cards=True), "green"),
        (check_locked_memory(limits(memlock_bytes=64 << 10), has_cards=True), "amber"),
        (check_locked_memory(limits(memlock_bytes=64 << 10), has_cards=False), "green"),
        (check_open_files(limits(nofile=1024)), "amber"),
        (check_open_files(limits(nofile=65536)), "green"),
        (check_open_files(limits(nofile=None)), "green"),
        (check_ssh(None), "amber"),
        (check_ssh("/usr/bin/ssh"), "green"),
        (check_clock(0.0), "red"),
        (check_clock(1_795_000_000.0), "green"),
    ],
)
def test_each_thing_is_judged_and_a_fix_given_where_it_is_not_well(finding: Finding, verdict: Verdict) -> None:
    assert finding.verdict == verdict
    assert (finding.fix is None) == (verdict == "green")


def test_the_state_folder_must_be_the_users_to_write(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert check_state_folder(environ).verdict == "green"
    folder = tmp_path / "state" / "dsrun" / "jobs"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    assert check_state_folder(environ).verdict == "green"
    folder.chmod(0o777)
    assert check_state_folder(environ).fix == f"chmod 700 {folder}"
    folder.rmdir()
    folder.write_text("")
    assert check_state_folder(environ).verdict == "red"


def test_crashed_jobs_are_named_and_what_is_left_of_them(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    jobs, proc = tmp_path / "dsrun" / "jobs", tmp_path / "proc"
    leave_job(jobs, "a", outcome="done")
    assert check_crashed_jobs(environ, proc=proc).verdict == "green"
    leave_job(jobs, "b")
    leave_job(jobs, "c", created=NOW - timedelta(hours=1))
    found = check_crashed_jobs(environ, proc=proc)
    assert (found.verdict, found.text) == ("amber", "crashed, no process left: b, c")
    assert found.fix == "`dsrun rm b c` forgets them"
    for pid, job_id in {"17": "c", "9": "c", "5": "a", "4": "other"}.items():
        (proc / pid).mkdir(parents=True)
        (proc / pid / "environ").write_bytes(f"HOME=/\0{JOB_ID_ENV}={job_id}\0".encode())
    (proc / "1").mkdir()
    found = check_crashed_jobs(environ, proc=proc)
    assert found.text == "crashed, with processes left: c (pid 9, 17)"
    assert found.fix == "`dsrun stop c` ends what is left"


def test_the_processes_of_a_job_are_found_by_their_environment() -> None:
    env = {**os.environ, JOB_ID_ENV: "doctor-test"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE) as process:
        assert processes_by_job(Path("/proc"))["doctor-test"] == [process.pid]
        process.communicate(b"\n")


def test_two_ranks_meet_in_a_trial_job() -> None:
    found = check_trial(clean_environment())
    # How long it takes is the machine's business: amber where it is busy.
    assert found.verdict in ("green", "amber"), found.text
    assert found.text.startswith("two ranks all-reduced over Gloo in ")


def test_a_trial_job_that_fails_is_red_with_its_own_words() -> None:
    found = check_trial(clean_environment(DSRUN_CONFIG="/no/such.json"), python=sys.executable)
    assert found.verdict == "red"
    assert found.text.startswith("exit code 2: error: ")


def test_only_red_means_that_jobs_fail() -> None:
    findings = [
        Finding(name="a", verdict="green", text="well"),
        Finding(name="b", verdict="amber", text="so so", fix="do"),
    ]
    assert is_well(findings)
    assert json.loads(to_json(findings))["ok"] is True
    assert not is_well([*findings, Finding(name="c", verdict="red", text="bad", fix="do")])
    assert json.loads(to_json(findings))["checks"][1] == {
        "name": "b",
        "verdict": "amber",
        "text": "so so",
        "fix": "do",
    }
