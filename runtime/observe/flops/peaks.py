"""FLOP/s that a device can reach by its datasheet, where it is known: what MFU is a share of. Measures nothing."""

from __future__ import annotations

import torch

from dsrun.estimate.run.catalogue import find_product


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the dense FLOP/s of a device in a dtype, without sparsity; None where no datasheet is known here.

    Args:
        device: Device that computes.
        dtype: Dtype of the products.
    """
    if device.type != "cuda":
        return None
    return product_peak_flops(torch.cuda.get_device_name(device), dtype)


def product_peak_flops(product: str, dtype: torch.dtype) -> float | None:
    """Returns the dense FLOP/s of a GPU by the name that its driver gives it; None where it is not known.

    Args:
        product: Name, such as `NVIDIA H200`.
        dtype: Dtype of the products.
    """
    gpu = find_product(product)
    if gpu is None:
        return None
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision not in ("ieee", "none"):
        return None  # by TF32 or bf16, several times as many as the datasheet has for fp32
    return {torch.bfloat16: gpu.half_flops, torch.float16: gpu.half_flops, torch.float32: gpu.single_flops}.get(dtype)
