"""Why a job here would go without GPUs where it was given some: the driver does not serve them, or dsrun does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..gpus.read import GpuReport
from .unserved import unserved_accelerators


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableGpus:
    """GPUs that a job here was given and cannot use: the driver fails, or dsrun has no backend for them.

    Attributes:
        text: sentence that says what is wrong with the GPUs.
        fix: the way out.
    """

    text: str
    fix: str


def unusable_gpus(
    report: GpuReport, environ: Mapping[str, str], *, root: Path = Path("/"), import_path: Sequence[str] | None = None
) -> UnusableGpus | None:
    """Says why a job would go without a GPU where it was given some; None where that is not so.

    Args:
        report: report of the GPUs, as the driver told of them.
        environ: environment variables of the job.
        root: `/`, or a made-up tree with sys and dev.
        import_path: folders where torch is looked for; None means `sys.path`.
    """
    if report.fault is not None:
        text = f"the GPUs of this machine cannot be used: {report.fault.reason}"
        return UnusableGpus(text=text, fix=f"{report.fault.way_out}; `--no-gpu` trains on the CPU")
    unserved = None if report.usable_count else unserved_accelerators(environ, root=root, import_path=import_path)
    return None if unserved is None else UnusableGpus(text=unserved.text, fix=unserved.way_out)
