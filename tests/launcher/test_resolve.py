"""What cannot be driven through the command line on every machine; the rest of `resolve` is tested in test_cli.py."""

from __future__ import annotations

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.hosts import Allocation, HostSpec
from dsrun.launcher.probe_gpu import Gpu, GpuReport
from dsrun.launcher.resolve import check_nccl


def gpu_report(usable: int, reason: str | None = None) -> GpuReport:
    blank = {"uuid": None, "name": None, "memory_total_bytes": None, "memory_free_bytes": None}
    gpus = tuple(Gpu(index=n, compute_capability=None, usable=n < usable, **blank) for n in range(2))  # type: ignore[arg-type]
    return GpuReport(gpus=gpus, usable_count=usable, driver=None, driver_cuda=None, reason=reason)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (gpu_report(0, "no NVIDIA driver"), "no NVIDIA driver"),
        (gpu_report(0), "CUDA_VISIBLE_DEVICES hides all of them"),
    ],
)
def test_nccl_without_a_gpu_is_refused_with_the_reason(report: GpuReport, reason: str) -> None:
    hosts = Allocation(hosts=(HostSpec(name="localhost", slots=1, source="this machine"),))
    with pytest.raises(UsageError) as caught:
        check_nccl(report, hosts, torch="2.13.0+cu128", cuda="12.8")
    assert caught.value.render() == (
        f"error: `--backend nccl` needs a GPU and this machine offers none: {reason}\n"
        "hint: `--backend gloo` trains on the CPU"
    )


def test_nccl_needs_a_cuda_build_and_a_gpu_for_each_rank() -> None:
    hosts = Allocation(hosts=(HostSpec(name="localhost", slots=3, source="this machine"),))
    with pytest.raises(UsageError, match=r"needs CUDA and torch 2\.13\.0\+cpu is built without it"):
        check_nccl(gpu_report(2), hosts, torch="2.13.0+cpu", cuda=None)
    with pytest.raises(UsageError, match="needs a GPU for each rank; 3 ranks share 2"):
        check_nccl(gpu_report(2), hosts, torch="2.13.0+cu128", cuda="12.8")
