"""`attention`: scaled-dot-product attention by a kernel chosen from shapes, format, device and mask.

What kernels can and hold is known in `dsrun.choices.attention_kernels`; here torch is asked and called.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsrun.choices.attention_kernels import (
    KERNELS,
    AttentionCall,
    AttentionKernel,
    Format,
    KernelChoice,
    choose_kernel,
)
from dsrun.errors import ModelError

_FORMATS: dict[torch.dtype, Format] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_BACKENDS: dict[AttentionKernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(
    q_BHLD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    kernel: Literal["auto"] | AttentionKernel = "auto",
) -> Tensor:
    """Returns `F.scaled_dot_product_attention(...)`, by the kernel that holds least and is fastest.

    Keys and values may have fewer heads than queries (grouped queries). No collectives.

    Args:
        q_BHLD: shape [B, H, L, D], floating point.
        k_BKSD: shape [B, K, S, D], K a divisor of H.
        v_BKSE: shape [B, K, S, E].
        mask: True where a query sees a key, or a number to add; broadcast to [B, H, L, S]. Not together with `causal`.
        causal: a query sees the keys up to its own position.
        dropout: share of probabilities that are dropped; of evaluation the caller has to take care.
        scale: factor of the scores; None for 1 / sqrt(D).
        kernel: `auto`, or by name.

    Returns:
        shape [B, H, L, E], dtype of `q_BHLD`.

    Raises:
        ModelError: shapes that do not fit, or a kernel by name that cannot take this call.
    """
    choice = choice_for(q_BHLD, k_BKSD, v_BKSE, mask=mask, causal=causal, dropout=dropout)
    if kernel == "auto":
        able = choice.able
    else:
        if kernel not in _BACKENDS:
            raise ModelError(f"attention: kernel is {kernel!r}; expected 'auto', {', '.join(map(repr, KERNELS))}")
        if kernel in choice.obstacles:
            raise ModelError(
                f"attention: kernel={kernel!r} cannot take this call: {choice.obstacles[kernel]}",
                hint=f"leave kernel out for {choice.kernel!r}",
            )
        able: list[AttentionKernel] = [kernel]
    with sdpa_kernel([_BACKENDS[name] for name in able], set_priority=True):
        return F.scaled_dot_product_attention(
            q_BHLD,
            k_BKSD,
            v_BKSE,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=q_BHLD.shape[1] != k_BKSD.shape[1],
        )


def choice_for(
    q_BHLD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> KernelChoice:
    """Returns which kernel `attention` takes for these tensors and why; on CUDA torch's own checks are asked.

    Raises:
        ModelError: shapes that do not fit.
    """
    _check(q_BHLD, k_BKSD, v_BKSE, mask=mask, causal=causal)
    on_cuda = q_BHLD.device.type == "cuda"
    batch, heads, queries, width = q_BHLD.shape
    call = AttentionCall(
        batch=batch,
        heads=heads,
        kv_heads=k_BKSD.shape[1],
        queries=queries,
        keys=k_BKSD.shape[2],
        head_dim=width,
        value_dim=v_BKSE.shape[3],
        dtype=_FORMATS[q_BHLD.dtype],
        device_type=q_BHLD.device.type,
        capability=torch.cuda.get_device_capability(q_BHLD.device) if on_cuda else (0, 0),
        cudnn=torch.backends.cudnn.version() if on_cuda else None,
        causal=causal,
        mask_dims=0 if mask is None else mask.dim(),
        mask_trains=mask is not None and mask.requires_grad,
        dropout=dropout,
    )
    allowed = _asked(q_BHLD, k_BKSD, v_BKSE, mask, causal=causal, dropout=dropout) if on_cuda else None
    return choose_kernel(call, allowed=allowed)


def _asked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, dropout: float
) -> dict[AttentionKernel, bool]:
    """Returns what torch's checks say of each fused kernel on CUDA."""
    cuda: Any = torch.backends.cuda
    params = cuda.SDPAParams(q, k, v, mask, dropout, causal, q.shape[1] != k.shape[1])
    return {
        "flash": cuda.can_use_flash_attention(params),
        "cudnn": cuda.can_use_cudnn_attention(params),
        "efficient": cuda.can_use_efficient_attention(params),
    }


def _check(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> None:
    """Raises ModelError unless shapes and dtypes fit each other."""
    shapes = f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ModelError(f"attention: {shapes}; expected four dimensions: samples, heads, positions, width")
    fits = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ModelError(
            f"attention: {shapes} do not fit",
            hint="samples and widths of queries and keys are alike, and heads of keys divide those of queries",
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _FORMATS:
        raise ModelError(
            f"attention: queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}; expected one float"
        )
    if mask is not None and causal:
        raise ModelError("attention: mask and causal are both given", hint="put what is causal into the mask")
