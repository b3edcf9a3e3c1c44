"""What torch, CUDA and NCCL say once they are loaded, asked of the target Python in a process of its own.

Package metadata tells what is installed; a wheel's NCCL may be another one than LD_LIBRARY_PATH loads. This process
imports no torch: the other does, under a time-out, and says what it found as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.units import format_duration

#: Importing torch from a shared file system takes that long at worst; starting CUDA adds a second a GPU.
DEEP_PATIENCE_S = 60.0
_SHOWN_CHARS = 300

_QUESTIONS = """
import json, sys
import torch
found = {"torch": torch.__version__, "cuda_built": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
found["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
found["devices"] = torch.cuda.device_count() if found["cuda_available"] else 0
found["nccl"] = None
# Of a build for CUDA, also where there is no driver: its version is asked of the library, not of a GPU.
if torch.distributed.is_available() and torch.distributed.is_nccl_available():
    version = torch.cuda.nccl.version()
    found["nccl"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
found["architectures"] = torch._C._cuda_getArchFlags().split() if torch.version.cuda else []
found["cuda_init"] = found["driver_cuda"] = None
if torch.version.cuda:
    import ctypes
    try:
        library = ctypes.CDLL("libcuda.so.1")
        found["cuda_init"] = library.cuInit(0)
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
            found["driver_cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    except OSError:
        pass
found["gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
found["mpi"] = torch.distributed.is_available() and torch.distributed.is_mpi_available()
found["threads"] = torch.get_num_threads()
with open("/proc/self/maps") as file:
    paths = {line.split()[-1] for line in file}
found["libraries"] = sorted(p for p in paths if any(n in p for n in ("libnccl", "libcudart", "libcudnn.", "libcuda.")))
print(json.dumps(found), file=sys.__stdout__)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLibraries:
    """What was loaded.

    Attributes:
        torch: version that was imported.
        cuda_built: CUDA it was built for; None for a CPU build.
        cuda_available: CUDA started.
        devices: GPUs CUDA shows.
        cudnn: version as torch numbers it, 90100 for 9.1.0.
        nccl: version of the library that was loaded; None where torch has no such backend.
        gloo: the backend is there.
        mpi: the backend is there.
        threads: threads torch would use.
        libraries: files of NVIDIA's libraries in the process.
        architectures: GPU architectures that torch has kernels for, `sm_90`, or that it can compile kernels for,
            `compute_90`.
        driver_cuda: newest CUDA version of the driver library that was loaded.
        cuda_init: number that starting CUDA returned, 0 if it started, else the error's; None without CUDA in torch, or
            without libcuda.
    """

    torch: str
    cuda_built: str | None
    cuda_available: bool
    devices: int
    cudnn: int | None
    nccl: str | None
    gloo: bool
    mpi: bool
    threads: int
    libraries: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    driver_cuda: str | None = None
    cuda_init: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownLibraries:
    """Nothing could be told; `reason` says why."""

    reason: str


def read_loaded(
    python: str, environ: Mapping[str, str], *, patience_s: float = DEEP_PATIENCE_S
) -> LoadedLibraries | UnknownLibraries:
    """Imports torch in another process and asks it.

    Args:
        python: the interpreter jobs use.
        environ: the environment of jobs.
        patience_s: longest time in seconds to wait for the other process.
    """
    try:
        done = subprocess.run(
            # With -c the working folder comes first on the path, and a file there could stand in for torch.
            [python, "-c", f"import sys; sys.path[:1] = []\n{_QUESTIONS}"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience_s,
        )
    except subprocess.TimeoutExpired:
        return UnknownLibraries(reason=f"importing torch took longer than {format_duration(patience_s)}")
    except OSError as error:
        return UnknownLibraries(reason=f"{python}: {(error.strerror or str(error)).lower()}")
    lines = os.fsdecode(done.stdout).strip().splitlines()
    if done.returncode != 0 or not lines:
        said = os.fsdecode(done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
        return UnknownLibraries(reason=said[-1][:_SHOWN_CHARS])
    try:
        found: dict[str, Any] = json.loads(lines[-1])
        lists: dict[str, list[str]] = {name: found.pop(name) for name in ("libraries", "architectures")}
        return LoadedLibraries(
            **found, libraries=tuple(lists["libraries"]), architectures=tuple(lists["architectures"])
        )
    except (ValueError, TypeError, KeyError):
        return UnknownLibraries(reason=f"{python} answered {lines[-1][:_SHOWN_CHARS]!r}")
