"""Accelerators for which dsrun has no backend: AMD's, Intel's, Apple's and others, named where a job expects them.

Asks no driver and imports no torch: what the kernel shows is in gpu_presence, and what torch was built for stands in
its version.py. A card that draws the desktop is nobody's accelerator, unless this torch was built for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.host.gpu_presence import Accelerators, hides_all_gpus, other_accelerators

from ..software.versions import read_torch_builds

#: By maker: what torch/version.py sets in a build for it, and how people call that build.
_BUILDS = {"AMD": ("hip", "ROCm"), "Intel": ("xpu", "XPU")}
_MAKERS_OF_GPUS = ("AMD", "Intel", "Apple")
#: Variables by which AMD's are hidden; torch reads CUDA's there too.
_HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
#: How to go on without a GPU.
WAY_OUT = "`--backend gloo` trains on the CPU"


@dataclass(frozen=True, slots=True)
class UnservedAccelerators:
    """Accelerators that a job cannot have.

    Attributes:
        text: sentence that names the accelerators and says that dsrun does not train on them.
        way_out: advice on how to go on without these accelerators.
    """

    text: str
    way_out: str


def unserved_accelerators(
    environ: Mapping[str, str], *, root: Path = Path("/"), import_path: Sequence[str] | None = None
) -> UnservedAccelerators | None:
    """Looks for accelerators that a job here would be expected to train on; None without any.

    Ask it where there is no NVIDIA GPU to use: beside one, others are left alone.

    Args:
        environ: environment variables of the job; one that hides all devices says that none is to be used.
        root: `/`, or a made-up tree with sys and dev.
        import_path: folders where torch is looked for; None means `sys.path`.
    """
    there = other_accelerators(root)
    if not there or any(hides_all_gpus({"CUDA_VISIBLE_DEVICES": environ[name]}) for name in _HIDING if name in environ):
        return None
    builds = read_torch_builds(import_path)
    for found in there:
        key, build = _BUILDS.get(found.name, ("", ""))
        if found.for_computing or key in builds:
            return UnservedAccelerators(_text(found, f"{build} {builds[key]}" if key in builds else ""), WAY_OUT)
    return None


def _text(found: Accelerators, build: str) -> str:
    what = f"{found.name} GPU" if found.name in _MAKERS_OF_GPUS else found.name
    article = "an" if what[0] in "AEIOU" else "a"
    there = f"{article} {what}" if found.count == 1 else f"{found.count} {what}s"
    torch = f", for which torch is built ({build})" if build else ""
    return f"this machine has {there}{torch}; dsrun trains on GPUs of NVIDIA, and on CPUs"
