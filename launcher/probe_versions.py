"""Which versions are installed, read from package metadata: nothing that is asked about is imported."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11", "nvidia-nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What is installed beside this interpreter; None where it is not.

    Attributes:
        dsrun: this package.
        python: the interpreter.
        python_path: where it is.
        torch: with the build's tag, `2.13.0+cpu`.
        cuda: what torch was built for; None for a CPU build.
        nccl: the package torch loads it from.
    """

    dsrun: str | None
    python: str
    python_path: str
    torch: str | None
    cuda: str | None
    nccl: str | None


def read_versions(path: Sequence[str] | None = None) -> Versions:
    """Reads the versions of what stands on the import path.

    Args:
        path: folders to search instead of `sys.path`.
    """
    torch = _find("torch", path)
    nccl = next((found for name in _NCCL_PACKAGES if (found := _find(name, path)) is not None), None)
    dsrun = _find("dsrun", path)
    return Versions(
        dsrun=None if dsrun is None else dsrun.version,
        python=platform.python_version(),
        python_path=sys.executable,
        torch=None if torch is None else torch.version,
        cuda=None if torch is None else _built_for(torch),
        nccl=None if nccl is None else nccl.version,
    )


def parse_cuda_version(version_py: str) -> str | None:
    """Finds the CUDA version in the text of torch/version.py."""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", version_py, re.MULTILINE)
    return None if match is None else match.group(1)


def _find(name: str, path: Sequence[str] | None) -> metadata.Distribution | None:
    found = metadata.distributions(name=name, path=list(sys.path if path is None else path))
    return next(iter(found), None)


def _built_for(torch: metadata.Distribution) -> str | None:
    try:
        with open(str(torch.locate_file("torch/version.py")), encoding="utf-8") as file:
            return parse_cuda_version(file.read())
    except OSError:
        return None
