from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from dsrun.launcher.machine.software.loaded_libraries import LoadedLibraries, UnknownLibraries, read_loaded
from support.cli import clean_environment

TORCH = """
import ctypes
from types import SimpleNamespace
__version__ = "2.14.1+cu130"
version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(is_available=lambda: False)
backends = SimpleNamespace(cudnn=SimpleNamespace(is_available=lambda: False))
distributed = SimpleNamespace(is_available=lambda: False)
_C = SimpleNamespace(_cuda_getArchFlags=lambda: "sm_75 sm_90 compute_120")
get_num_threads = lambda: 4

def tell(number):
    number._obj.value = 13010
    return 0

ctypes.CDLL = {"libcuda.so.1": SimpleNamespace(cuInit=lambda flags: 802, cuDriverGetVersion=tell)}.__getitem__
"""


#: A build for CUDA on a machine without a GPU, whose NCCL is loaded all the same.
WITH_NCCL = """
cuda.nccl = SimpleNamespace(version=lambda: (2, 27, 5))
distributed = SimpleNamespace(
    is_available=lambda: True,
    is_nccl_available=lambda: True,
    is_gloo_available=lambda: True,
    is_mpi_available=lambda: False,
)
"""


def program(folder: Path, text: str) -> str:
    """A made-up interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_torch_that_is_imported_elsewhere_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file of the working folder must not stand in for torch.
    (tmp_path / "torch.py").write_text("raise AssertionError('imported from the working folder')\n")
    monkeypatch.chdir(tmp_path)
    loaded = read_loaded(sys.executable, clean_environment())
    assert isinstance(loaded, LoadedLibraries)
    # The metadata of wheels on PyPI leaves the build out, as in 2.10.0+cu128.
    assert loaded.torch.partition("+")[0] == version("torch").partition("+")[0]
    assert (loaded.gloo, loaded.devices) == (True, 0) or loaded.cuda_available
    assert loaded.threads >= 1
    # A build for CUDA has kernels, and starts CUDA only with a driver.
    assert bool(loaded.architectures) == (loaded.cuda_built is not None)
    assert (loaded.cuda_init == 0) == loaded.cuda_available
    assert "torch" not in sys.modules or sys.modules["torch"].__file__ != str(tmp_path / "torch.py")


def test_cuda_itself_is_asked_whether_it_starts_and_how_new_it_is(tmp_path: Path) -> None:
    """A made-up torch and libcuda, as no machine of a test has every error."""
    (tmp_path / "torch.py").write_text(TORCH)
    loaded = read_loaded(sys.executable, {**clean_environment(), "PYTHONPATH": str(tmp_path)})
    assert isinstance(loaded, LoadedLibraries)
    assert (loaded.cuda_init, loaded.driver_cuda) == (802, "13.1")
    assert loaded.architectures == ("sm_75", "sm_90", "compute_120")


@pytest.mark.parametrize(("distributed", "nccl"), [("", None), (WITH_NCCL, "2.27.5")])
def test_the_nccl_that_torch_has_is_told_where_no_gpu_is(tmp_path: Path, distributed: str, nccl: str | None) -> None:
    (tmp_path / "torch.py").write_text(TORCH + distributed)
    loaded = read_loaded(sys.executable, {**clean_environment(), "PYTHONPATH": str(tmp_path)})
    assert isinstance(loaded, LoadedLibraries)
    assert (loaded.cuda_available, loaded.nccl) == (False, nccl)


def test_an_import_that_fails_is_told_in_its_last_words(tmp_path: Path) -> None:
    python = program(tmp_path, "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    assert read_loaded(python, {}) == UnknownLibraries(reason="ModuleNotFoundError: No module named 'torch'")


def test_an_import_that_hangs_is_given_up(tmp_path: Path) -> None:
    found = read_loaded(program(tmp_path, "exec sleep 60"), {"PATH": "/usr/bin:/bin"}, patience_s=0.2)
    assert isinstance(found, UnknownLibraries)
    assert found.reason.startswith("importing torch took longer than")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 3", "exit status 3"),
        ("true", "exit status 0"),
        ("echo nonsense", "answered 'nonsense'"),
        ("echo '{\"torch\": 1}'", "answered '{\"torch\": 1}'"),
        ("echo '[1]'", "answered '[1]'"),
    ],
)
def test_an_answer_that_is_none_is_a_reason_and_not_a_crash(tmp_path: Path, text: str, reason: str) -> None:
    found = read_loaded(program(tmp_path, text), {})
    assert isinstance(found, UnknownLibraries)
    assert found.reason.endswith(reason)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    assert read_loaded(missing, {}) == UnknownLibraries(reason=f"{missing}: no such file or directory")
