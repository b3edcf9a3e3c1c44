"""Newton-Schulz: the nearest orthogonal matrix, roughly, by products alone. Whole matrices in, nothing distributed.

The singular values of the result lie around 1, between 0.5 and 1.5; Muon needs no more.

Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NsMethod = Literal["gram", "standard"]

#: Steepest at 0 of the quintics that stay bounded; five steps bring singular values from 0.01 on to about 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPS = 1e-7


def orthogonalise(matrix_RC: Tensor, method: NsMethod = "standard") -> Tensor:
    """Returns the orthogonalised matrix, bf16, [R, C].

    Args:
        matrix_RC: any float dtype; taken as bf16.
        method: `standard` iterates on the matrix in bf16, as the source does; `gram` on its smaller Gram matrix in
            fp32, which costs fewer operations where one side is much longer.
    """
    x = matrix_RC.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    x = _standard(x) if method == "standard" else _gram(x.float()).bfloat16()
    return x.T if is_tall else x


def _standard(x: Tensor) -> Tensor:
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x


def _gram(x: Tensor) -> Tensor:
    """Every step multiplies X by a polynomial of X X^T from the left, so the polynomials are multiplied alone."""
    gram = x @ x.T
    product = torch.eye(x.shape[0], dtype=x.dtype, device=x.device)
    for _ in range(_STEPS):
        factor = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        factor.diagonal().add_(_A)
        product = factor @ product
        gram = factor @ gram @ factor
    return product @ x
