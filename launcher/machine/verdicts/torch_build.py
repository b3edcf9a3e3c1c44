"""Whether torch is installed, and built for the GPUs that are there: rules over values, pure.

Whether its CUDA, the driver and the GPUs go together is judged in cuda_fit, and handed in here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..software.versions import Versions
from ..verdict import Context, ProbeVerdict
from .cuda_fit import CudaFit


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
