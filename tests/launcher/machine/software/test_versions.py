from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.machine.software.versions import (
    environment_kind,
    parse_constant,
    parse_cuda_version,
    read_software,
    read_versions,
    telling_variables,
)
from dsrun.launcher.plan.environment import LIBRARY_PREFIXES
from support.topologies import write_tree


def test_versions_come_from_metadata_of_packages_that_cannot_be_imported(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "torch-2.11.0+cu128.dist-info/METADATA": "Name: torch\nVersion: 2.11.0+cu128\n",
            "torch/__init__.py": "raise AssertionError('imported')\n",
            "torch/version.py": "from typing import Optional\ncuda: Optional[str] = '12.8'\n",
            "nvidia_nccl_cu12-2.27.3.dist-info/METADATA": "Name: nvidia-nccl-cu12\nVersion: 2.27.3\n",
        },
    )
    versions = read_versions([str(tmp_path)])
    assert (versions.torch, versions.cuda, versions.nccl, versions.dsrun) == ("2.11.0+cu128", "12.8", "2.27.3", None)


def test_torchs_version_is_the_one_that_it_names_itself_where_the_index_dropped_the_build(tmp_path: Path) -> None:
    files = {
        "torch-2.13.0.dist-info/METADATA": "Name: torch\nVersion: 2.13.0\n",
        "torch/version.py": "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n",
    }
    assert read_versions([str(write_tree(tmp_path, files))]).torch == "2.13.0+cu130"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [("cuda = '12.6'\n", "12.6"), ("cuda: Optional[str] = None\n", None), ("", None), ("xcuda = '1'\n", None)],
)
def test_cuda_version_is_read_from_the_text_of_torch(text: str, cuda: str | None) -> None:
    assert parse_cuda_version(text) == cuda


def test_a_constant_is_read_from_text_without_running_it() -> None:
    text = "__version__ = '2.11.0'\ngit_version = 'ab12'\nhip: Optional[str] = None\n"
    assert parse_constant(text, "git_version") == "ab12"
    assert parse_constant(text, "hip") is None


@pytest.mark.parametrize(
    ("prefix", "conda", "kind"), [("/v", False, "venv"), ("/usr", True, "conda"), ("/usr", False, "system")]
)
def test_the_kind_of_environment_is_named(prefix: str, conda: bool, kind: str) -> None:
    assert environment_kind(prefix, "/usr", conda=conda) == kind


def test_software_finds_programs_in_path_and_masks_secrets(tmp_path: Path) -> None:
    for name in ("gcc", "mpirun"):
        write_tree(tmp_path, {name: "#!/bin/sh\n"})
        (tmp_path / name).chmod(0o755)
    environ = {
        "PATH": str(tmp_path),
        "CUDA_HOME": str(tmp_path / "cuda"),
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "hf_abcdefghijklmnopqrst",
        "HOME": "/root",
    }
    found = read_software(environ, [])
    assert (found.compiler, found.mpi, found.nvcc) == (str(tmp_path / "gcc"), str(tmp_path / "mpirun"), None)
    assert found.variables == {"CUDA_HOME": str(tmp_path / "cuda"), "HF_TOKEN": "***", "NCCL_DEBUG": "INFO"}


def test_nvcc_is_found_in_cuda_home_where_path_does_not_lead_to_it(tmp_path: Path) -> None:
    write_tree(tmp_path, {"bin/nvcc": "#!/bin/sh\n"})
    (tmp_path / "bin/nvcc").chmod(0o755)
    assert read_software({"PATH": "", "CUDA_HOME": str(tmp_path)}, []).nvcc == str(tmp_path / "bin/nvcc")


def test_packages_beside_torch_are_told_by_their_metadata(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "torch-2.11.0.dist-info/METADATA": "Name: torch\nVersion: 2.11.0\n",
            "torch/version.py": "git_version = 'cafe'\n",
            "triton-3.6.0.dist-info/METADATA": "Name: triton\nVersion: 3.6.0\n",
            "nvidia_cudnn_cu12-9.10.2.dist-info/METADATA": "Name: nvidia-cudnn-cu12\nVersion: 9.10.2\n",
        },
    )
    found = read_software({}, [str(tmp_path)])
    assert (found.torch_git, found.triton, found.cudnn) == ("cafe", "3.6.0", "9.10.2")


def test_every_variable_that_ranks_of_other_hosts_get_is_told() -> None:
    names = [f"{prefix}X" for prefix in LIBRARY_PREFIXES]
    told = ["CUDA_DEVICE_ORDER", "NVIDIA_TF32_OVERRIDE", "TORCHELASTIC_RUN_ID", "LD_LIBRARY_PATH", *names]
    assert set(telling_variables({**dict.fromkeys(told, "1"), "HOME": "/root"})) == set(told)
