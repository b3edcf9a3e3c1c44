"""Whether GPUs and their driver run what torch is built for: one rule for the probe, the doctor and preflight. Pure.

[Note: CUDA versions] A driver runs every CUDA up to its own, and newer ones of the same major version. A newer major
version runs by *forward compatibility*: a libcuda.so.1 of a newer driver stands before the driver's own (package
cuda-compat; NGC's containers have it). That works on data centre GPUs only: on GeForce CUDA does not start (error 804),
even where the driver alone would do. A libcuda older than the driver does not start either (error 803). Each torch has
kernels for some GPUs: CUDA 13 has none for those before sm 7.5, and CUDA before 12.8 none for Blackwell (sm 10.0 and
12.0), which may still run a torch that brings PTX for it; wheels bring none.

Source: docs.nvidia.com/deploy/cuda-compatibility; release notes of CUDA 12.8 and 13.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: The first driver branch of a major version of CUDA.
_FIRST_BRANCH = {11: 450, 12: 525, 13: 580}
#: Of a GPU's name: where forward compatibility never works, and where it does on some machines only.
_CONSUMER = ("GeForce", "TITAN")
_WORKSTATION = ("RTX", "Quadro")
#: Major version of CUDA -> the oldest GPUs that it has a compiler for.
_OLDEST_GPU = {12: (5, 0), 13: (7, 5)}
#: The first CUDA with a compiler for the newest GPUs, and the oldest of those.
_BLACKWELL_CUDA, _BLACKWELL = (12, 8), (10, 0)
_UPDATE = "update the driver, or install a torch that is built for CUDA {} or older"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFit:
    """How torch, CUDA's driver library, the driver and the GPUs go together.

    Attributes:
        verdict: `green`: they do; `note`: they do by forward compatibility; `amber`: perhaps; `red`: they do not.
        text: sentence about how torch, CUDA's driver library, the driver and the GPUs go together.
        fix: the way out; None where none is needed.
    """

    verdict: Literal["green", "note", "amber", "red"]
    text: str
    fix: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitGpu:
    """A GPU of a job, as far as this rule asks: product name, and compute capability `9.0`; None where unknown."""

    name: str | None
    capability: str | None


def cuda_fit(
    *,
    built: str,
    driver: str | None,
    newest: str | None,
    libcuda: str | None,
    gpus: Sequence[FitGpu],
    starts: bool = False,
) -> CudaFit:
    """Judges whether a torch runs here. See [Note: CUDA versions].

    Args:
        built: CUDA version torch is built for.
        driver: version of the driver; None where it is not known.
        newest: newest CUDA version that the driver says it runs; it counts libcuda's, so a newer libcuda may hide an
            older driver.
        libcuda: version of the library that programs load; None where it is not known.
        gpus: GPUs that a job sees.
        starts: CUDA was started and did: what is said of the driver and its library is shown to be right.
    """
    old = _without_kernels(built, gpus)
    if old is not None:
        return old
    new = None if starts else _older_than_a_gpu(built, gpus)
    known = f"torch is built for CUDA {built}, driver {driver or 'unknown'} runs up to {newest or 'unknown'}"
    fits = newest is None or major(built) <= major(newest)
    if starts or driver is None or libcuda is None or _parts(libcuda) == _parts(driver):
        if fits or starts:
            return new or CudaFit(verdict="green", text=known, fix=None)
        return CudaFit(verdict="red", text=known, fix=_UPDATE.format(newest))
    if _parts(libcuda) < _parts(driver):
        text = f"libcuda {libcuda} is loaded before that of driver {driver}: CUDA does not start (error 803)"
        fix = "take its folder (often .../cuda/compat) out of LD_LIBRARY_PATH, or of `ldconfig -p`"
        return CudaFit(verdict="red", text=text, fix=fix)
    return _forward(built, driver, libcuda, gpus)


def has_kernels(capability: str, architectures: Sequence[str]) -> bool:
    """Whether a torch runs on a GPU.

    Args:
        capability: compute capability of the GPU, `9.0`.
        architectures: architectures from torch.cuda.get_arch_list(): `sm_90` holds for 9.x from 9.0 on, `compute_90`
            for all GPUs from 9.0 on; with an `a` both hold for 9.0 alone, with an `f` for 9.x from 9.0 on.
    """
    gpu = _parts(capability)
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        only = number.endswith("a")
        digits = number.rstrip("af")
        if not digits.isdecimal() or len(digits) < 2:
            continue
        its = (int(digits[:-1]), int(digits[-1]))
        same_major = its[0] == gpu[0] and its <= gpu
        onward = kind == "compute" and its <= gpu and digits == number
        if its == gpu or (not only and (same_major or onward)):
            return True
    return False


def major(version: str) -> int:
    """Returns the first number of a version; 0 where it has none."""
    digits = version.split(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _forward(built: str, driver: str, libcuda: str, gpus: Sequence[FitGpu]) -> CudaFit:
    """Judges a libcuda that is newer than the driver."""
    needed = _FIRST_BRANCH.get(major(built))
    if needed is not None and major(libcuda) < needed:
        text = f"torch is built for CUDA {built}, and neither driver {driver} nor libcuda {libcuda} before it runs that"
        fix = f"update the driver to {needed} or newer, or install a torch that is built for an older CUDA"
        return CudaFit(verdict="red", text=text, fix=fix)
    text = f"torch is built for CUDA {built}, libcuda {libcuda} runs it on driver {driver} (forward compatibility)"
    names = [gpu.name for gpu in gpus if gpu.name is not None]
    consumer = next((name for name in names if any(word in name for word in _CONSUMER)), None)
    if consumer is not None:
        text = f"libcuda {libcuda} is newer than driver {driver}: CUDA does not start on {consumer} (error 804)"
        fix = f"update the driver to {major(libcuda)} or newer, or take the folder of libcuda out of LD_LIBRARY_PATH"
        return CudaFit(verdict="red", text=text, fix=f"{fix} (`ldconfig -p`)")
    workstation = next((name for name in names if any(word in name for word in _WORKSTATION)), None)
    if workstation is not None:
        text = f"{text}, which {workstation} has on some servers only (else error 804)"
        return CudaFit(verdict="amber", text=text, fix="`dsrun probe --deep` tries it; an updated driver does without")
    if needed is not None and major(driver) >= needed:
        return CudaFit(verdict="green", text=text, fix=None)
    return CudaFit(verdict="note", text=text, fix="nothing; an updated driver does without")


def _without_kernels(built: str, gpus: Sequence[FitGpu]) -> CudaFit | None:
    """Finds a GPU that is too old for every torch of this major version of CUDA."""
    oldest = _OLDEST_GPU.get(major(built))
    for gpu in gpus:
        if oldest is not None and gpu.capability is not None and _parts(gpu.capability) < oldest:
            which = f"{gpu.name or 'a GPU'} (sm {gpu.capability})"
            text = f"torch is built for CUDA {built}, which has no kernels for {which}"
            fix = "install a torch that is built for an older CUDA: wheels for cu126 run from sm 5.0 on"
            return CudaFit(verdict="red", text=text, fix=fix)
    return None


def _older_than_a_gpu(built: str, gpus: Sequence[FitGpu]) -> CudaFit | None:
    """Finds a GPU that is newer than the CUDA of a torch, which has no machine code for it."""
    if _parts(built) >= _BLACKWELL_CUDA:
        return None
    for gpu in gpus:
        if gpu.capability is not None and _parts(gpu.capability) >= _BLACKWELL:
            which = f"{gpu.name or 'a GPU'} (sm {gpu.capability})"
            text = f"torch is built for CUDA {built}, which is older than {which}: `no kernel image`, if it has no PTX"
            fix = "install a torch that is built for CUDA 12.8 or newer; `dsrun probe --deep` tells what this one has"
            return CudaFit(verdict="amber", text=text, fix=fix)
    return None


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
