"""A job never trains on the CPU unasked: why its GPUs do not serve is told with the way out, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.machine.devices.unusable import UnusableGpus, unusable_gpus
from dsrun.launcher.machine.gpus.read import read_gpus
from support.machines import Machine, recorded_machine


def on(machine: Machine, **environ: str) -> UnusableGpus | None:
    report = read_gpus(environ, load_nvml=machine.load_nvml, root=machine.root)
    return unusable_gpus(report, environ, root=machine.root, import_path=[])


@pytest.mark.parametrize("error", ["LibRmVersionMismatch", "DriverNotLoaded", "LibraryNotFound", "Unknown"])
def test_a_driver_that_fails_is_told_with_its_way_out_and_that_of_the_cpu(tmp_path: Path, error: str) -> None:
    found = on(recorded_machine("workstation", tmp_path, driver_fails=error))
    assert found is not None
    assert found.text.startswith("the GPUs of this machine cannot be used: ")
    assert found.fix.endswith("; `--no-gpu` trains on the CPU")


def test_accelerators_of_another_maker_are_told(tmp_path: Path) -> None:
    found = on(recorded_machine("mi300x", tmp_path))
    assert found == UnusableGpus(
        text="this machine has 8 AMD GPUs; dsrun trains on GPUs of NVIDIA, and on CPUs",
        fix="`--backend gloo` trains on the CPU",
    )


@pytest.mark.parametrize("machine", ["workstation", "desktop", "a100_mig"])
def test_gpus_that_serve_are_not_spoken_of(tmp_path: Path, machine: str) -> None:
    assert on(recorded_machine(machine, tmp_path)) is None


@pytest.mark.parametrize(("machine", "error"), [("workstation", "Unknown"), ("mi300x", None)])
def test_who_hides_all_gpus_means_it(tmp_path: Path, machine: str, error: str | None) -> None:
    here = recorded_machine(machine, tmp_path, driver_fails=error)
    assert on(here, CUDA_VISIBLE_DEVICES="") is None
