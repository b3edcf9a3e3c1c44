"""What probe, doctor and a launch say on every recorded machine and on each of its faults: `says` in its file.

The expectations are what a user of that machine is to be told. `probe` is every verdict, `doctor` what is said of CUDA
and GPUs, `launch` the job line, ranks and warnings of `dsrun train.py` or the error it ends with, `busy` who is on a
GPU or that the driver does not tell, and `cpus` where ranks run.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from dsrun.errors import DsrunError, UsageError
from dsrun.launcher.launch.checked_launch import Launch, Request
from dsrun.launcher.launch.resolve import resolve
from dsrun.launcher.machine.devices.choice import read_devices
from dsrun.launcher.machine.gpus.read import read_gpus
from dsrun.launcher.machine.processor.numa import cpu_list
from dsrun.launcher.machine.processor.rank_binding import read_bindings
from dsrun.launcher.machine.report import ProbeReport
from dsrun.launcher.preflight.doctor import check_gpus, check_torch
from support.machines import NAMES, Machine, recorded_facts, recorded_machine
from support.nvml import ERRORS
from support.topologies import write_tree

#: Errors with which a driver does not start, and what of them a launch says.
DRIVER_FAULTS = {
    "LibRmVersionMismatch": "Driver/library version mismatch: the driver was updated",
    "DriverNotLoaded": "NVIDIA's kernel module is not loaded",
    "LibraryNotFound": "libnvidia-ml.so.1, the driver's library, is not found",
    "Unknown": "Unknown Error",
}


@dataclass(frozen=True)
class Case:
    """A recorded machine and what is to be said of it."""

    machine: Machine
    says: dict[str, Any]
    report: ProbeReport


def launch_on(machine: Machine) -> Launch:
    """`dsrun train.py` in the job's environment, whose node is this machine."""
    here = socket.gethostname()
    slurm_node = machine.environ.get("SLURMD_NODENAME", here)
    environ = {name: here if value == slurm_node else value for name, value in machine.environ.items()}
    request = Request(words=("train.py",))
    return resolve(request, environ=environ, verbs=[], load_nvml=machine.load_nvml, root=machine.root)


def cases() -> Iterator[Any]:
    for name in NAMES:
        facts = recorded_facts(name)
        for fault in (None, *facts.get("faults", ())):
            yield pytest.param((name, fault), id=name if fault is None else f"{name}, {fault}")


@pytest.fixture(scope="module", params=cases())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torch_site: str) -> Case:
    name, fault = request.param
    machine = recorded_machine(name, tmp_path_factory.mktemp("machine"), fault=fault)
    report = machine.report(import_path=[torch_site])
    return Case(machine=machine, says=recorded_facts(name, fault=fault)["says"], report=report)


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def torch_site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An import path with a torch that is built for CUDA, as on these machines."""
    files = {
        "torch/version.py": "__version__ = '2.9.0+cu126'\ncuda: Optional[str] = '12.6'\n",
        "torch-2.9.0.dist-info/METADATA": "Name: torch\nVersion: 2.9.0+cu126\n",
    }
    return str(write_tree(tmp_path_factory.mktemp("site"), files))


def test_probe_and_doctor_say_what_is_to_be_known(case: Case) -> None:
    assert [f"{verdict.level}: {verdict.text}" for verdict in case.report.verdicts] == case.says["probe"]
    _, cuda, *gpus = (*check_torch(case.report), *check_gpus(case.report))
    assert [f"{found.verdict}: {found.text}" for found in (cuda, *gpus)] == case.says["doctor"]


def test_a_launch_says_what_it_takes_or_why_it_does_not_start(case: Case) -> None:
    expected = case.says["launch"]
    if "error" in expected:
        with pytest.raises(UsageError) as caught:
            launch_on(case.machine)
        (problem,) = caught.value.problems
        assert {"error": problem.message, "hint": problem.hint} == expected
        return
    launch = launch_on(case.machine)
    # This machine's own torch has no CUDA, and says so.
    warnings = [text for text in launch.warnings if not text.startswith("warning: torch ")]
    found = {"devices": launch.devices, "ranks": launch.demand.ranks, "warnings": warnings}
    assert found == {"warnings": [], **expected}


def test_who_is_on_a_gpu_is_told_and_nobody_else(case: Case) -> None:
    busy: Any
    try:
        devices = read_devices(case.machine.environ, load_nvml=case.machine.load_nvml)
        busy = {device.label: list(device.used_by) for device in devices if device.used_by}
    except DsrunError as error:
        busy = str(error)
    assert busy == case.says.get("busy", {})


def test_ranks_run_where_the_probe_shows_them_whoever_is_asked_for_gpus(case: Case) -> None:
    """The driver, and where it was not asked, the kernel."""
    machine = case.machine
    shown = [binding.cpus for binding in case.report.binding]
    places = read_gpus(machine.environ, load_nvml=machine.load_nvml, root=machine.root).places
    environs = [machine.environ] * len(shown)
    # Slices are told by the driver alone.
    for gpus in (places,) if any(place.slices for place in places) else (places, ()):
        # A file that is closed to the job is a socket there: access(2) alone would not tell.
        bound = read_bindings(
            "auto", environs, gpus=gpus, root=machine.root, allowed=machine.cpus, may_open=Path.is_file
        )
        assert [None if one.cpus is None else cpu_list(one.cpus) for one in bound] == shown
    assert shown == case.says.get("cpus", shown)


def test_the_made_up_driver_has_the_names_and_errors_of_the_real_one(tmp_path: Path) -> None:
    driver = recorded_machine("workstation", tmp_path / "root").load_nvml()
    assert [name for name in vars(driver) if not hasattr(pynvml, name)] == []
    told = {name: str(error()) for name, error in ERRORS.items()}
    real = {name: getattr(pynvml, f"NVMLError_{name}") for name in ERRORS}
    texts = pynvml.NVMLError._errcode_to_string
    assert {name: texts.get(error().value, told[name]) for name, error in real.items()} == told


@pytest.mark.parametrize("error", DRIVER_FAULTS)
@pytest.mark.parametrize("name", ["hgx_h200_job", "gh200", "desktop"])
def test_a_driver_that_does_not_start_is_never_a_job_on_the_cpu(tmp_path: Path, name: str, error: str) -> None:
    machine = recorded_machine(name, tmp_path / "root", driver_fails=error)
    with pytest.raises(UsageError) as caught:
        launch_on(machine)
    (problem,) = caught.value.problems
    assert problem.message.startswith("the GPUs of this machine cannot be used: ")
    assert DRIVER_FAULTS[error] in problem.message
    assert problem.hint is not None
    assert problem.hint.endswith("`--no-gpu` trains on the CPU")
