"""Accelerators that dsrun does not serve are named where a job would use them, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dsrun.launcher.machine.devices.unserved import unserved_accelerators
from support.machines import recorded_machine
from support.topologies import write_tree

KFD = "sys/class/kfd/kfd/topology/nodes"
RYZEN = {
    "dev/kfd": "",
    f"{KFD}/0/properties": "simd_count 0\n",
    f"{KFD}/1/properties": "simd_count 24\ngfx_target_version 110003\n",
}
INTEL = {
    "sys/bus/pci/devices/0000:00:02.0/class": "0x030000\n",
    "sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n",
    "dev/dri/renderD128": "",
}


def torch_built(folder: Path, line: str) -> list[str]:
    """Writes what an installed torch shows; returns where."""
    files = {
        "torch/version.py": f"__version__ = '2.9.0'\n{line}\n",
        "torch-2.9.0.dist-info/METADATA": "Name: torch\nVersion: 2.9.0\n",
    }
    return [str(write_tree(folder / "site", files))]


def test_eight_mi300x_are_refused_whatever_torch_is_built_for(tmp_path: Path) -> None:
    machine = recorded_machine("mi300x", tmp_path)
    found = unserved_accelerators({}, root=machine.root, import_path=[])
    assert found is not None
    assert found.text == "this machine has 8 AMD GPUs; dsrun trains on GPUs of NVIDIA, and on CPUs"
    assert found.way_out == "`--backend gloo` trains on the CPU"


@pytest.mark.parametrize(
    ("files", "line", "what"),
    [
        (RYZEN, "hip: Optional[str] = '6.4.43482'", "an AMD GPU, for which torch is built (ROCm 6.4.43482)"),
        ({"dev/kfd": ""}, "hip = '6.4'", "an AMD GPU, for which torch is built (ROCm 6.4)"),
        (INTEL, "xpu: Optional[str] = '20250101'", "an Intel GPU, for which torch is built (XPU 20250101)"),
    ],
)
def test_a_desktops_gpu_is_refused_where_torch_is_built_for_it(
    tmp_path: Path, files: Mapping[str, str], line: str, what: str
) -> None:
    path = torch_built(tmp_path, line)
    found = unserved_accelerators({}, root=write_tree(tmp_path, files), import_path=path)
    assert found is not None
    assert found.text == f"this machine has {what}; dsrun trains on GPUs of NVIDIA, and on CPUs"


@pytest.mark.parametrize(
    "line", ["cuda: Optional[str] = '12.8'\nhip: Optional[str] = None", "hip: Optional[str] = None"]
)
@pytest.mark.parametrize("files", [RYZEN, INTEL, {}])
def test_what_draws_the_desktop_stops_nobody(tmp_path: Path, files: Mapping[str, str], line: str) -> None:
    path = torch_built(tmp_path, line)
    assert unserved_accelerators({}, root=write_tree(tmp_path, files), import_path=path) is None


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_accelerators_that_a_variable_hides_stop_nobody(tmp_path: Path, name: str) -> None:
    machine = recorded_machine("mi300x", tmp_path)
    assert unserved_accelerators({name: ""}, root=machine.root, import_path=[]) is None
    assert unserved_accelerators({name: "0,1"}, root=machine.root, import_path=[]) is not None
