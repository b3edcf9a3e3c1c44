"""What clients of DeepSpeed set and set back while they build a model: its changes to torch's constructors.

DeepSpeed's `zero.Init` replaces torch's functions by ones that make floating tensors in the config's dtype. dsrun's
leaves them as they are, so here stand torch's own; what a client puts in their place changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: What DeepSpeed keeps of torch before it replaces it.
torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype
) -> Callable[..., Tensor]:
    """Returns a constructor of tensors as it is.

    Args:
        fn: constructor, such as `torch.zeros`.
        target_fp_dtype: DeepSpeed's argument, without effect: dsrun converts no buffers.
    """
    del target_fp_dtype
    return fn
