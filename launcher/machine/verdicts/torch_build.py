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
        versions: of what is installed there.
        gpus: how many GPUs it has.
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
    elif versions.cuda is None and (gpus or context.needs_gpus):
        # Hosts of one job that are mended alike have one text.
        idle = 0 if context.needs_gpus else gpus
        there = f", and this machine has {idle} GPU{'' if idle == 1 else 's'}" if idle else ""
        yield ProbeVerdict(
            level="red" if context.needs_gpus else "amber",
            text=f"torch {versions.torch} is built without CUDA{there}",
            fix="install a CUDA build (https://pytorch.org/get-started), or train on the CPU with `--backend gloo`",
            path="versions.cuda",
        )
    if fit is not None and fit.verdict != "green":
        yield ProbeVerdict(level=fit.verdict, text=fit.text, fix=fit.fix or "nothing", path="versions.cuda")
