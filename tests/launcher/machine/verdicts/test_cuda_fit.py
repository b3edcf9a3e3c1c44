"""Whether a torch runs on a driver: by its own version, by forward compatibility where that works, and not else."""

from __future__ import annotations

import pytest

from dsrun.launcher.machine.verdicts.cuda_fit import CudaFit, FitGpu, cuda_fit, has_kernels

H100 = FitGpu(name="NVIDIA H100 80GB HBM3", capability="9.0")
A6000 = FitGpu(name="NVIDIA RTX A6000", capability="8.6")
RTX_4090 = FitGpu(name="NVIDIA GeForce RTX 4090", capability="8.9")
V100 = FitGpu(name="Tesla V100-SXM2-32GB", capability="7.0")
RTX_5090 = FitGpu(name="NVIDIA GeForce RTX 5090", capability="12.0")
T4 = FitGpu(name="Tesla T4", capability="7.5")


def fit(
    built: str, driver: str | None, newest: str | None, libcuda: str | None, *gpus: FitGpu, starts: bool = False
) -> CudaFit:
    return cuda_fit(built=built, driver=driver, newest=newest, libcuda=libcuda, gpus=gpus or (H100,), starts=starts)


@pytest.mark.parametrize(
    ("built", "driver", "newest", "libcuda", "gpu", "verdict"),
    [
        # The driver's own library.
        ("13.0", "580.65.06", "13.0", "580.65.06", H100, "green"),
        ("12.8", "525.60.13", "12.0", "525.60.13", H100, "green"),
        ("13.0", "535.216.03", "12.2", "535.216.03", H100, "red"),
        ("13.0", "535.216.03", "12.2", None, H100, "red"),
        ("13.0", "580.65.06", None, None, H100, "green"),
        ("13.0", None, None, None, H100, "green"),
        # NGC's image on an older driver: the library before the driver's own counts, and NVML tells its version.
        ("13.0", "535.216.03", "12.2", "580.65.06", H100, "note"),
        ("13.0", "535.216.03", "13.0", "580.65.06", H100, "note"),
        ("13.0", "535.216.03", "13.0", "580.65.06", FitGpu(name=None, capability=None), "note"),
        ("13.0", "535.216.03", "12.8", "570.133.20", H100, "red"),
        ("12.8", "550.90.07", "12.8", "570.133.20", H100, "green"),
        # Error 804, also where the driver alone would do.
        ("13.0", "535.216.03", "13.0", "580.65.06", RTX_4090, "red"),
        ("12.1", "525.147.05", "12.1", "530.30.02", RTX_4090, "red"),
        ("13.0", "535.216.03", "13.0", "580.65.06", A6000, "amber"),
        # Error 803
        ("12.4", "580.65.06", "12.4", "550.54.15", H100, "red"),
        # CUDA 13 has no kernels for Volta.
        ("13.0", "580.65.06", "13.0", "580.65.06", V100, "red"),
        ("12.6", "580.65.06", "13.0", "580.65.06", V100, "green"),
        ("13.0", "580.65.06", "13.0", "580.65.06", T4, "green"),
        # CUDA before 12.8 has none for Blackwell, but for what PTX brings.
        ("12.6", "580.65.06", "13.0", "580.65.06", RTX_5090, "amber"),
        ("12.8", "580.65.06", "13.0", "580.65.06", RTX_5090, "green"),
        ("13.0", "570.133.20", "12.8", "570.133.20", RTX_5090, "red"),
    ],
)
def test_a_torch_runs_where_driver_library_and_gpu_go_together(
    built: str, driver: str | None, newest: str | None, libcuda: str | None, gpu: FitGpu, verdict: str
) -> None:
    found = fit(built, driver, newest, libcuda, gpu)
    assert (found.verdict, found.fix is None) == (verdict, verdict == "green")


def test_what_does_not_fit_is_named_with_its_error() -> None:
    assert fit("13.0", "535.1", "13.0", "580.65.06", RTX_4090).text == (
        "libcuda 580.65.06 is newer than driver 535.1: CUDA does not start on NVIDIA GeForce RTX 4090 (error 804)"
    )
    assert "error 803" in fit("12.4", "580.65.06", "12.4", "550.54.15").text
    assert fit("13.0", "580.65", "13.0", None, H100, V100).text == (
        "torch is built for CUDA 13.0, which has no kernels for Tesla V100-SXM2-32GB (sm 7.0)"
    )
    assert fit("13.0", "535.216.03", "12.2", "580.65.06").text == (
        "torch is built for CUDA 13.0, libcuda 580.65.06 runs it on driver 535.216.03 (forward compatibility)"
    )


def test_a_cuda_that_was_started_is_believed_above_the_rule() -> None:
    assert fit("13.0", "535.216.03", "13.0", "580.65.06", A6000, starts=True).verdict == "green"
    assert fit("13.0", "580.65.06", "13.0", "580.65.06", V100, starts=True).verdict == "red"
    # What the imported torch has kernels for is told of it itself.
    assert fit("12.6", "580.65.06", "13.0", "580.65.06", RTX_5090, starts=True).verdict == "green"


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ("9.0", ["sm_80", "sm_90"], True),
        # Within a major version machine code runs on newer GPUs, not on older ones.
        ("8.9", ["sm_80", "sm_90"], True),
        ("8.0", ["sm_86", "sm_90"], False),
        ("7.0", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"], False),
        ("12.0", ["sm_50", "sm_80", "sm_90"], False),
        # PTX is compiled for every newer one.
        ("12.0", ["sm_80", "compute_90"], True),
        ("8.0", ["compute_90"], False),
        # For one architecture, and for one family of them.
        ("9.0", ["sm_90a"], True),
        ("10.0", ["sm_90a", "compute_90a"], False),
        ("10.3", ["sm_100a"], False),
        ("10.3", ["sm_100f"], True),
        ("12.0", ["compute_100f"], False),
        ("9.0", [], False),
        ("9.0", ["gfx942"], False),
    ],
)
def test_kernels_run_on_gpus_of_their_architecture_or_newer_ones(
    capability: str, architectures: list[str], runs: bool
) -> None:
    assert has_kernels(capability, architectures) is runs
