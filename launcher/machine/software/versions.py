"""Which versions are installed, read from package metadata: nothing that is asked about is imported."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ...masking import masked
from ...plan.environment import LIBRARY_PREFIXES
from .libcuda import libcuda_version

#: Variables that change what a training run does: those that other hosts get too, and those of this machine.
TELLING_PREFIXES = (
    *LIBRARY_PREFIXES,
    *("CUDA_", "NVIDIA_", "TORCH", "DSRUN_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "LD_", "VIRTUAL_ENV", "CONDA_"),
)
_CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11", "nvidia-nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What is installed beside this interpreter; None where it is not.

    Attributes:
        dsrun: version of this package (dsrun); None where it is not installed.
        python: the interpreter.
        python_path: path of the interpreter.
        torch: version of torch with the build's tag, `2.13.0+cpu`; None where torch is not installed.
        cuda: version of CUDA that torch was built for; None for a CPU build.
        nccl: the package torch loads it from.
        libcuda: CUDA's driver library that programs load: the driver's own, or a newer one by forward compatibility.
    """

    dsrun: str | None
    python: str
    python_path: str
    torch: str | None
    cuda: str | None
    nccl: str | None
    libcuda: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What else decides how a job runs; None where it is not there.

    Attributes:
        environment: `venv`, `conda` or `system`.
        prefix: folder of the Python environment.
        torch_git: commit torch was built from.
        cudnn: version of the package torch loads it from.
        triton: version of the package.
        compiler: path of the C compiler, with which Triton and extensions are built at run time.
        nvcc: path of CUDA's compiler.
        mpi: path of mpirun.
        variables: those that steer NCCL, CUDA, torch and their kin; secrets masked.
    """

    environment: str
    prefix: str
    torch_git: str | None
    cudnn: str | None
    triton: str | None
    compiler: str | None
    nvcc: str | None
    mpi: str | None
    variables: dict[str, str]


def read_software(environ: Mapping[str, str], path: Sequence[str] | None = None) -> Software:
    """Looks for programs and packages.

    Args:
        environ: environment variables, of which PATH and those that change a training run are read.
        path: folders to search for packages instead of `sys.path`.
    """
    search = environ.get("PATH", os.defpath)
    torch = _find("torch", path)
    return Software(
        environment=environment_kind(sys.prefix, sys.base_prefix, conda=(Path(sys.prefix) / "conda-meta").is_dir()),
        prefix=sys.prefix,
        torch_git=None if torch is None else parse_constant(_version_text(torch), "git_version"),
        cudnn=_first_version(_CUDNN_PACKAGES, path),
        triton=_first_version(("triton",), path),
        compiler=next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name, path=search))), None),
        nvcc=shutil.which("nvcc", path=search) or _cuda_home_nvcc(environ),
        mpi=shutil.which("mpirun", path=search),
        variables=telling_variables(environ),
    )


def telling_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change what a training run does, by name; secrets are masked."""
    return {name: masked(name, value) for name, value in sorted(environ.items()) if name.startswith(TELLING_PREFIXES)}


def environment_kind(prefix: str, base_prefix: str, *, conda: bool) -> str:
    """Names the kind of Python environment."""
    if prefix != base_prefix:
        return "venv"
    return "conda" if conda else "system"


def read_versions(
    path: Sequence[str] | None = None, *, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> Versions:
    """Reads the versions of what stands on the import path.

    Args:
        path: folders to search instead of `sys.path`.
        environ: environment variables of programs that will load libcuda; None means those of this process.
        root: `/`, or a made-up tree with etc and lib.
    """
    torch = _find("torch", path)
    dsrun = _find("dsrun", path)
    return Versions(
        dsrun=None if dsrun is None else dsrun.version,
        python=platform.python_version(),
        python_path=sys.executable,
        # As it names itself: the package index drops the build (`+cu130`) from the version of the package.
        torch=None if torch is None else parse_constant(_version_text(torch), "__version__") or torch.version,
        cuda=None if torch is None else parse_cuda_version(_version_text(torch)),
        nccl=_first_version(_NCCL_PACKAGES, path),
        libcuda=libcuda_version(root, os.environ if environ is None else environ),
    )


def read_torch_builds(path: Sequence[str] | None = None) -> dict[str, str]:
    """Returns what torch was built for, `cuda`, `hip` or `xpu`, with its version; nothing for a CPU build.

    Args:
        path: folders to search instead of `sys.path`.
    """
    torch = _find("torch", path)
    text = "" if torch is None else _version_text(torch)
    found = {name: parse_constant(text, name) for name in ("cuda", "hip", "xpu")}
    return {name: version for name, version in found.items() if version is not None}


def parse_cuda_version(version_py: str) -> str | None:
    """Finds the CUDA version in the text of torch/version.py."""
    return parse_constant(version_py, "cuda")


def parse_constant(version_py: str, name: str) -> str | None:
    """Finds a text that a module sets (`cuda: Optional[str] = '12.8'`), without running it."""
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", version_py, re.MULTILINE)
    return None if match is None else match.group(1)


def _first_version(names: Sequence[str], path: Sequence[str] | None) -> str | None:
    found = (_find(name, path) for name in names)
    return next((distribution.version for distribution in found if distribution is not None), None)


def _find(name: str, path: Sequence[str] | None) -> metadata.Distribution | None:
    found = metadata.distributions(name=name, path=list(sys.path if path is None else path))
    return next(iter(found), None)


def _version_text(torch: metadata.Distribution) -> str:
    try:
        with open(str(torch.locate_file("torch/version.py")), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _cuda_home_nvcc(environ: Mapping[str, str]) -> str | None:
    """Where nvcc is if PATH does not lead to it: torch's extensions look there too."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc", path=f"{home}/bin")
