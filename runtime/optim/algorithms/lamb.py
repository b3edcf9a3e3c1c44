"""LAMB: Adam whose step is scaled tensor by tensor, so that large batches take large rates.

    u = mhat / (sqrt(vhat) + eps) + wd * p;   p -= lr * clamp(|p| / |u|, min_coeff, max_coeff) * u

where the scale is 1 if |p| or |u| is 0. The norms are exact over shards, see [Note: exact sums]; a step enters two
all-reduces of two numbers a tensor. The step u is computed twice and stored nowhere.

Source: You et al., Large Batch Optimization for Deep Learning (2020), algorithm 2; coefficients as DeepSpeed's
FusedLamb has them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ...layout.unit_layout import TENSOR_ALIGN
from ..structure.base import StructuredOptimizer, chunks, with_gap
from ..structure.exact_sums import agree, cell_squares, finish, rounded
from ..structure.runs import Run

_OF = "LAMB's norms"


class Lamb(StructuredOptimizer):
    """See the head of the file.

    Args:
        params: parameters or group dicts.
        lr: learning rate.
        bias_correction: correct the running means for their start at zero.
        betas: decay of the running means of gradient and squared gradient.
        eps: number added to the square root of the second moment; added under the root with `eps_inside_sqrt`.
        eps_inside_sqrt: add it under the root instead.
        weight_decay: weight decay, kept apart from the gradient and added to the step, so that it counts in the step's
            norm.
        max_coeff: largest scale of a tensor's step.
        min_coeff: smallest.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def state_roles(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `StructuredOptimizer`."""
        return "exp_avg", "exp_avg_sq"

    def state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """See `StructuredOptimizer`."""
        return 8.0 * prod(shape)

    def prepare(self) -> None:
        """See `StructuredOptimizer`: two fp32 states an element, and no others."""
        for run in self.runs:
            self.state[run.param] = {role: torch.zeros_like(run.param.detach()) for role in ("exp_avg", "exp_avg_sq")}
        self._index = {info.name: number for number, info in enumerate(self.tensors)}
        cells = [-(-info.numel // TENSOR_ALIGN) for info in self.tensors]
        self._counts = torch.tensor([cells, cells], device=self.device)
        self._ranks = self.ranks_of_sums([*range(len(cells)), *range(len(cells))])

    def update(self) -> None:
        """See `StructuredOptimizer`; two all-reduces of two numbers a tensor."""
        # 1. New means, and squares of weights and steps by cell.
        runs = self.stepped_runs
        cells = [self._advance(run) for run in runs]
        # 2. The norms of each tensor over all ranks: row 0 weights, row 1 steps.
        largest = torch.zeros_like(self._counts, dtype=torch.float64)
        totals = torch.zeros_like(largest)
        for run, cells_2C in zip(runs, cells, strict=True):
            for index, first, stop in self._tensors_of(run):
                largest[:, index] = torch.maximum(largest[:, index], cells_2C[:, first:stop].amax(dim=1).double())
        scales = agree(largest.view(-1), self._counts.view(-1), self._ranks, label=_OF).view_as(largest)
        for run, cells_2C in zip(runs, cells, strict=True):
            for index, first, stop in self._tensors_of(run):
                totals[:, index] += rounded(cells_2C[:, first:stop], scales[:, index : index + 1]).sum(dim=1)
        sums = finish(totals.view(-1), largest.view(-1), scales.view(-1), self._ranks, label=_OF).view_as(largest)
        weights, steps = sums.sqrt()
        ratios = torch.where((weights > 0) & (steps > 0), weights / steps, torch.ones_like(weights))
        # 3. The step, scaled.
        for run in runs:
            self._apply(run, ratios, (weights > 0) & (steps > 0))

    def _tensors_of(self, run: Run) -> list[tuple[int, int, int]]:
        """Returns (number of the tensor, first cell in the run, one past the last) for each piece of a run."""
        return [
            (
                self._index[piece.extent.name],
                piece.shard_offset // TENSOR_ALIGN,
                -(-(piece.shard_offset + piece.stop - piece.start) // TENSOR_ALIGN),
            )
            for piece in run.pieces()
        ]

    def _advance(self, run: Run) -> Tensor:
        """Moves the means on; returns squares of (weights, steps), [2, cells of the run]."""
        group, step = self.param_groups[run.group], self.step_of_run(run)
        b1, b2 = group["betas"]
        p_N, g_N = run.param.view(-1), self.grad(run)
        m_N, v_N = (self.state[run.param][role].view(-1) for role in ("exp_avg", "exp_avg_sq"))
        found: list[Tensor] = []
        for start, stop in chunks(p_N.numel(), p_N.device):
            g, m, v = g_N[start:stop], m_N[start:stop], v_N[start:stop]
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            p = p_N[start:stop]
            found.append(torch.stack([cell_squares(p), cell_squares(_step_of(p, m, v, group, step))]))
        return torch.cat(found, dim=1)

    def _apply(self, run: Run, ratios: Tensor, is_scaled: Tensor) -> None:
        group, step = self.param_groups[run.group], self.step_of_run(run)
        bounded = ratios.clamp(group["min_coeff"], group["max_coeff"])
        scales = (torch.where(is_scaled, bounded, ratios) * group["lr"]).float()
        p_N = run.param.view(-1)
        m_N, v_N = (self.state[run.param][role].view(-1) for role in ("exp_avg", "exp_avg_sq"))
        for piece in run.pieces():
            scale = scales[self._index[piece.extent.name]]
            for start, stop in chunks(with_gap(piece, run), p_N.device):
                part = slice(piece.shard_offset + start, piece.shard_offset + stop)
                p = p_N[part]
                p.addcmul_(_step_of(p, m_N[part], v_N[part], group, step), scale, value=-1)


def _step_of(p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> Tensor:
    """Returns u, unscaled; a new tensor of the shape of `p`."""
    b1, b2 = group["betas"]
    corrections = (1 - b1**step, 1 - b2**step) if group["bias_correction"] else (1.0, 1.0)
    u = v / corrections[1]
    u = u.add_(group["eps"]).sqrt_() if group["eps_inside_sqrt"] else u.sqrt_().add_(group["eps"])
    u = torch.div(m, u, out=u).div_(corrections[0])
    return u.add_(p, alpha=group["weight_decay"]) if group["weight_decay"] else u
