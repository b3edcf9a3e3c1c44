"""GPUs by the names people and drivers use."""

from __future__ import annotations

import pytest

from dsrun.errors import UsageError
from dsrun.estimate.run.catalogue import CATALOGUE, find_gpu, find_product

_GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100-80G", "H100-80G"),
        ("h100", "H100-80G"),
        ("A100", "A100-80G"),
        ("a100-40g", "A100-40G"),
        ("A100-80GB", "A100-80G"),
        ("NVIDIA H200", "H200-141G"),
        ("rtx 4090", "RTX4090-24G"),
        ("V100", "V100-32G"),
    ],
)
def test_a_gpu_is_found_by_what_people_call_it(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G"),
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80G"),
        ("NVIDIA H200", "H200-141G"),
        ("NVIDIA B200", "B200-180G"),
        ("NVIDIA L40S", "L40S-48G"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24G"),
        ("Tesla V100-SXM2-32GB", "V100-32G"),
        ("Tesla T4", "T4-16G"),
    ],
)
def test_a_gpu_is_found_by_what_the_driver_calls_it(product: str, name: str) -> None:
    gpu = find_product(product)
    assert gpu is not None
    assert gpu.name == name


def test_an_unknown_product_is_none_and_no_error() -> None:
    assert find_product("NVIDIA GeForce GTX 1080") is None


def test_an_unknown_name_is_answered_with_close_ones() -> None:
    with pytest.raises(UsageError) as error:
        find_gpu("H101")
    assert error.value.render() == "error: GPU `H101` is not in the catalogue\nhint: expected `H100-80G`"


@pytest.mark.parametrize("gpu", CATALOGUE, ids=lambda gpu: gpu.name)
def test_every_row_has_a_source_and_figures_of_the_right_size(gpu: object) -> None:
    from dsrun.estimate.run.catalogue import GpuSpec

    assert isinstance(gpu, GpuSpec)
    label_gigabytes = int(gpu.name.rpartition("-")[2].removesuffix("G"))
    assert gpu.memory_bytes == pytest.approx(label_gigabytes * _GIB, rel=0.08)
    assert "NVIDIA" in gpu.source
    assert gpu.half_flops > gpu.single_flops > 1e12
    assert gpu.memory_bytes_per_s > gpu.peer_bytes_per_s >= gpu.pcie_bytes_per_s >= 16e9
