"""Whether torch is installed, and built for the GPUs that are there, and what it says of them: rules, pure.

Whether its CUDA, the driver and the GPUs go together is judged in cuda_fit, and handed in here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..report import ProbeReport
from ..software.versions import Versions
from ..verdict import Context, ProbeVerdict
from .cuda_fit import CudaFit, has_kernels

#: Of cuInit: what CUDA calls it, and the way out.
_CUDA_ERRORS = {
    100: ("no device", "are the device files there and yours (`ls -l /dev/nvidia*`)? In a container: `--gpus all`"),
    802: ("system not yet initialized", "`systemctl status nvidia-fabricmanager`, of the driver's version"),
    803: ("driver and libcuda do not fit", "take a folder with another libcuda out of LD_LIBRARY_PATH, or reboot"),
    804: ("no forward compatibility on this GPU", "update the driver, or take cuda-compat out of LD_LIBRARY_PATH"),
    999: ("unknown error", "`sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm`, or reboot"),
}


def torch_verdicts(versions: Versions, *, gpus: int, fit: CudaFit | None, context: Context) -> Iterator[ProbeVerdict]:
    """Judges the torch of a host.

    Args:
        versions: versions of the software that is installed on the host.
        gpus: number of the host's GPUs that jobs see.
        fit: whether this torch runs on them; None where there is nothing to judge.
        context: the jobs; without torch those that train fail, and without CUDA those that need GPUs.
    """
    if versions.torch is None:
        package = "torch" if context.torch is None else f"torch=={context.torch}"
        yield ProbeVerdict(
            level="red" if context.trains else "amber",
            text=f"torch is not installed beside Python at {versions.python_path}",
            fix=f"`{versions.python_path} -m pip install {package}`",
            path="versions.torch",
        )
    else:
        yield from cpu_build_verdicts(versions, gpus=gpus, context=context)
    if fit is not None and fit.verdict != "green":
        yield ProbeVerdict(level=fit.verdict, text=fit.text, fix=fit.fix or "nothing", path="versions.cuda")


def cpu_build_verdicts(versions: Versions, *, gpus: int, context: Context) -> Iterator[ProbeVerdict]:
    """Judges a torch that uses no GPU; of a host without torch it says nothing.

    Args:
        versions: versions of what is installed on the host.
        gpus: number of the host's GPUs that jobs see.
        context: the jobs; those that need GPUs fail.
    """
    if versions.torch is None or versions.cuda is not None or not (gpus or context.needs_gpus):
        return
    text = f"torch {versions.torch} is built without CUDA"
    if not context.needs_gpus:
        # Of jobs that fail nothing stays idle, and their hosts, mended alike, have one text.
        text += f": jobs train on the CPU, and {gpus} GPU{' stays' if gpus == 1 else 's stay'} idle"
    yield ProbeVerdict(
        level="red" if context.needs_gpus else "amber",
        text=text,
        fix="install a CUDA build (https://pytorch.org/get-started), or train on the CPU with `--backend gloo`",
        path="versions.cuda",
    )


def loaded_verdicts(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Judges what was found by trying: whether CUDA starts, and the imported torch has kernels for the GPUs."""
    loaded = report.loaded
    if loaded is None or not report.gpus_usable:
        return
    if loaded.cuda_init:
        text, fix = _CUDA_ERRORS.get(loaded.cuda_init, ("", "`nvidia-smi` and `dmesg | grep NVRM` say more"))
        told = f"CUDA does not start: error {loaded.cuda_init}{text and f', {text}'}"
        yield ProbeVerdict(level="red", text=told, fix=fix, path="loaded.cuda_init")
    without: dict[str, list[int]] = {}
    for gpu in report.gpus:
        capability = gpu.compute_capability
        if not gpu.usable or capability is None or not loaded.architectures:
            continue
        if not has_kernels(capability, loaded.architectures):
            without.setdefault(capability, []).append(gpu.index)
    for capability, indices in without.items():
        name = report.gpus[indices[0]].name or "GPU"
        text = f"torch {loaded.torch} has no kernels for {name} (sm {capability})"
        text += f": it has {', '.join(loaded.architectures)}"
        fix = "install a torch that is built for this GPU: https://pytorch.org/get-started"
        yield ProbeVerdict(level="red", text=text, fix=fix, path=f"gpus.{indices[0]}.compute_capability")
