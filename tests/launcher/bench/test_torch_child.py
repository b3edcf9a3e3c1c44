"""Rates of matrix products and copies come with their spread; on a GPU each device is measured."""

from __future__ import annotations

import pytest
import torch

from dsrun.launcher.bench.torch_child import cpu_figures, gpu_figures


def test_products_of_both_dtypes_are_measured_on_the_cpu() -> None:
    figures = list(cpu_figures(side=64, repetition_s=0.001))
    assert [one.name.split()[0] for one in figures] == ["fp32", "bf16"]
    assert all(one.unit == "FLOP/s" and one.low > 0 for one in figures)


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1)
def test_each_gpu_is_measured_both_ways_and_multiplies() -> None:
    count = torch.cuda.device_count()
    figures = list(gpu_figures(copy_bytes=1 << 20, side=256, repetition_s=0.001))
    assert len(figures) == 3 * count + (2 if count > 1 else 0)
    assert {one.unit for one in figures} == {"B/s", "FLOP/s"}
