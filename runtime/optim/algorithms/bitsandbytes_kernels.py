"""bitsandbytes' kernels for 8-bit states on CUDA, where it is installed: one launch a leaf in place of many.

The states are ours (`eight_bit`): its kernels take the same codes, scales and tables. Nothing of it is imported before
a kernel is asked for, and without it plain torch steps on every device.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..structure.codes import CodeTable

#: `auto`: bitsandbytes on CUDA where it is installed, else torch.
Kernels = Literal["auto", "torch", "bitsandbytes"]


def use_bitsandbytes(chosen: Kernels, device: torch.device) -> bool:
    """Whether bitsandbytes' kernels step on `device`."""
    if chosen == "auto":
        return device.type == "cuda" and importlib.util.find_spec("bitsandbytes") is not None
    return chosen == "bitsandbytes"


def update_coded(
    name: str,
    p_N: Tensor,
    g_N: Tensor,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    tables: Sequence[CodeTable],
    group: Mapping[str, Any],
) -> None:
    """Takes one step of weights and states in place.

    Args:
        name: name of the update: `adam` or `lion`.
        p_N: fp32, flat, from the start of a block on.
        g_N: fp32, flat.
        codes: uint8 [N], one or two states.
        scales: fp32, one a block of 256, for each.
        tables: code table of each state.
        group: hyperparameters, with `step` from 1 on.

    Raises:
        ModuleNotFoundError: bitsandbytes is not installed.
    """
    functional: Any = importlib.import_module("bitsandbytes.functional")
    update = cast(Callable[..., None], functional.optimizer_update_8bit_blockwise)
    two = len(codes) > 1
    update(
        optimizer_name=name,
        g=g_N,
        p=p_N,
        state1=codes[0],
        state2=codes[1] if two else None,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        beta3=0.0,
        alpha=0.0,
        eps=group.get("eps", 0.0),
        step=group["step"],
        lr=group["lr"],
        qmap1=tables[0].values,
        qmap2=tables[1].values if two else None,
        absmax1=scales[0],
        absmax2=scales[1] if two else None,
        weight_decay=group["weight_decay"],
    )
