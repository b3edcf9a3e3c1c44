"""All rules over a report: what is not as it should be, and the way out. Each subject has its module beside this.

A rule says what will happen to a job, not that a number is small. Where a value is unknown it says nothing.
"""

from __future__ import annotations

from ..report import ProbeReport
from ..verdict import Context, Level, ProbeVerdict
from .cpu_and_memory import cpu_verdicts, memory_verdicts
from .cuda_fit import CudaFit, FitGpu, cuda_fit
from .gpus import gpu_verdicts
from .limits import locked_memory_verdicts, open_files_verdicts, process_verdicts, shared_memory_verdicts
from .network import network_verdicts
from .rdma import rdma_verdicts, takes_rdma
from .storage import storage_verdicts
from .torch_build import loaded_verdicts, torch_verdicts

_ORDER: dict[Level, int] = {"red": 0, "amber": 1, "note": 2}


def judge(report: ProbeReport) -> tuple[ProbeVerdict, ...]:
    """Applies every rule; the worst first."""
    # Without GPUs ranks talk over Gloo, which takes no RDMA.
    context = Context(takes_rdma=bool(report.gpus) and takes_rdma(report), is_here=True)
    found = [
        *gpu_verdicts(report),
        *torch_verdicts(report.versions, gpus=report.gpus_usable, fit=fit_of(report), context=context),
        *loaded_verdicts(report),
        *locked_memory_verdicts(report.host.limits, has_cards=any(card.works for card in report.rdma), context=context),
        *open_files_verdicts(report.host.limits),
        *process_verdicts(report.host.limits),
        *shared_memory_verdicts(report.memory),
        *memory_verdicts(report),
        *cpu_verdicts(report),
        *storage_verdicts(report),
        *network_verdicts(report),
        *rdma_verdicts(report),
    ]
    return tuple(sorted(found, key=lambda verdict: _ORDER[verdict.level]))


def fit_of(report: ProbeReport) -> CudaFit | None:
    """Returns whether the installed torch runs on these GPUs; None without GPUs, or a torch for them."""
    if not report.gpus or report.versions.cuda is None:
        return None
    return cuda_fit(
        built=report.versions.cuda,
        driver=report.driver,
        newest=report.driver_cuda,
        libcuda=report.versions.libcuda,
        gpus=[FitGpu(name=gpu.name, capability=gpu.compute_capability) for gpu in report.gpus if gpu.usable],
        starts=report.loaded is not None and report.loaded.cuda_init == 0,
    )
