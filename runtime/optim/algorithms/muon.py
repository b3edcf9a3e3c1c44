"""Muon: momentum made orthogonal for matrices, AdamW for the rest.

    m = lerp(m, g, 1 - mu);   u = NewtonSchulz(lerp(g, m, mu)) * sqrt(max(1, rows / columns));   p -= lr * (u + wd * p)

Embeddings, the output layer and tensors of one dimension take AdamW, see `is_matrix`. Kernels of convolutions count as
matrices of their first dim by the rest.

[Note: whole matrices] Orthogonalising needs a matrix whole. Units are taken in windows that have a matrix for each
rank: the momentum of a window's units is gathered in bf16 (one all-gather a unit), each rank makes its share of the
matrices orthogonal and puts them into buffers that are zero elsewhere, and adding these up over the ranks brings every
slice home (one reduce-scatter a unit). Each matrix is worked on by one rank and x + 0 is x, so the bits do not depend
on how many ranks there are.

Source: Jordan et al., Muon (2024); the split and the scale as DeepSpeed's MuonWithAuxAdam has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...layout.unit_layout import UnitLayout
from ..structure.base import StructuredOptimizer, TensorInfo, chunks, with_gap
from ..structure.runs import Run
from .orthogonal import NsMethod, orthogonalise

_MATRIX, _REST = "matrix", "rest"
#: Parts of names that mean an embedding or an output layer, and module names that mean one.
_ENDS = ("embed", "lm_head")
_END_MODULES = frozenset({"wte", "wpe", "head", "output", "score", "classifier"})


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon makes a tensor's momentum orthogonal.

    Args:
        name: qualified name.
        shape: shape of the whole tensor.
    """
    if len(shape) < 2 or prod(shape) == 0:
        return False
    lower = name.lower()
    return not any(part in lower for part in _ENDS) and _END_MODULES.isdisjoint(lower.split("."))


@dataclass(frozen=True, slots=True)
class _Window:
    """Units whose matrices are shared out together.

    Attributes:
        layouts: layouts of the window's units.
        starts: first element of each unit's flat buffer in the window's buffer.
        matrices: (tensor, place in the window's buffer, rank that works on it).
    """

    layouts: tuple[UnitLayout, ...]
    starts: tuple[int, ...]
    matrices: tuple[tuple[TensorInfo, int, int], ...]

    @property
    def numel(self) -> int:
        """Elements of the window's buffer."""
        return sum(layout.padded_numel for layout in self.layouts)


class Muon(StructuredOptimizer):
    """See the head of the file.

    Args:
        params: parameters or group dicts.
        lr: learning rate; a schedule moves the rates of matrices and of the rest alike.
        momentum: mu.
        weight_decay: weight decay of all tensors, applied to the weights directly and not through the gradient.
        muon_lr: rate of matrices where `lr` has its first value; None: `lr`.
        adam_lr: rate of the tensors that AdamW steps, where `lr` has its first value; None for `lr`.
        betas: decay of AdamW's running means.
        eps: number added to the denominator of AdamW's update.
        ns_method: method of orthogonalisation, `standard` or `gram`; see `orthogonalise`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ns_method: NsMethod = "standard",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
            "ns_method": ns_method,
            "muon_scale": 1.0 if muon_lr is None or not lr else muon_lr / lr,
            "adam_scale": 1.0 if adam_lr is None or not lr else adam_lr / lr,
        }
        super().__init__(params, defaults)

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """See `StructuredOptimizer`."""
        return _MATRIX if is_matrix(name, shape) else _REST

    def takes_parts(self, name: str, shape: tuple[int, ...]) -> bool:
        """See `StructuredOptimizer`: what Adam updates; a part of a matrix would be made orthogonal by itself."""
        return self.kind_of(name, shape) == _REST

    def state_roles(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `StructuredOptimizer`."""
        return ("momentum_buffer",) if is_matrix(name, shape) else ("exp_avg", "exp_avg_sq")

    def state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """See `StructuredOptimizer`."""
        return (4.0 if is_matrix(name, shape) else 8.0) * prod(shape)

    def prepare(self) -> None:
        """See `StructuredOptimizer`; every rank must call, for buffers of the axis are made.

        Raises:
            ModelError: several pipeline stages have pieces of one matrix.
        """
        if self.axis is not None:
            _check_in_one_stage(self.tensors)
        for run in self.runs:
            roles = ("momentum_buffer",) if run.kind == _MATRIX else ("exp_avg", "exp_avg_sq")
            self.state[run.param] = {role: torch.zeros_like(run.param.detach()) for role in roles}
        self._windows = _windows(self.tensors, 1 if self.axis is None else self.axis.size)
        numel = max((window.numel for window in self._windows), default=0)
        self._gathered, self._results = (self._buffer(numel) for _ in range(2))

    def state_tensors(self) -> Any:
        """See `StructuredOptimizer`: with the two buffers that whole matrices stand in."""
        yield from super().state_tensors()
        yield from (self._gathered, self._results)

    def update(self) -> None:
        """See `StructuredOptimizer`; one all-gather and one reduce-scatter, in bf16, a unit that has matrices."""
        runs = self.stepped_runs
        for run in runs:
            if run.kind == _REST:
                self._adam(run)
        by_layout: dict[int, list[Run]] = {}
        for run in runs:
            if run.kind == _MATRIX:
                by_layout.setdefault(id(run.layout), []).append(run)
        for window in self._windows:
            self._step_window(window, by_layout)

    def _step_window(self, window: _Window, by_layout: dict[int, list[Run]]) -> None:
        placed = list(zip(window.layouts, window.starts, strict=True))
        pending: list[Any] = []
        for layout, start in placed:
            whole = self._gathered.narrow(0, start, layout.padded_numel)
            for run in by_layout.get(id(layout), ()):
                self._advance(run, whole.narrow(0, run.start, run.numel))
            if self.axis is not None:
                mine = whole.narrow(0, self.axis.rank * layout.shard_numel, layout.shard_numel)
                pending.append(self.axis.all_gather(whole, mine, label=f"momentum of {layout.name}"))
        for work in pending:
            work.wait()
        results = self._results.narrow(0, 0, window.numel).zero_()
        for info, start, rank in window.matrices:
            if (self.axis is None or rank == self.axis.rank) and not self.is_left_out(info.name):
                method = self.param_groups[info.group]["ns_method"]
                matrix = self._gathered.narrow(0, start, info.numel).view(info.shape[0], -1)
                results.narrow(0, start, info.numel).view_as(matrix).copy_(orthogonalise(matrix, method))
        if self.axis is not None:
            pending = [
                self.axis.reduce_scatter(results.narrow(0, start, layout.padded_numel), label=f"steps of {layout.name}")
                for layout, start in placed
            ]
            for work in pending:
                work.wait()
        for layout, start in placed:
            for run in by_layout.get(id(layout), ()):
                self._apply(run, results.narrow(0, start + run.start, run.numel))

    def _advance(self, run: Run, target_N: Tensor) -> None:
        """Moves a run's momentum on, and writes the matrices' next directions to `target_N`."""
        mu = self.param_groups[run.group]["momentum"]
        g_N, m_N = self.grad(run), self.state[run.param]["momentum_buffer"].view(-1)
        for start, stop in chunks(run.numel, g_N.device):
            m = m_N[start:stop].lerp_(g_N[start:stop], 1 - mu)
            target_N[start:stop] = torch.lerp(g_N[start:stop], m, mu)

    def _apply(self, run: Run, steps_N: Tensor) -> None:
        group = self.param_groups[run.group]
        lr = group["lr"] * group["muon_scale"]
        p_N = run.param.view(-1)
        for piece in run.pieces():
            rows = piece.extent.shape[0]
            rate = lr * sqrt(max(1.0, rows * rows / piece.extent.numel))
            for start, stop in chunks(with_gap(piece, run), p_N.device):
                part = slice(piece.shard_offset + start, piece.shard_offset + stop)
                p = p_N[part]
                if group["weight_decay"]:
                    p.mul_(1 - lr * group["weight_decay"])
                p.add_(steps_N[part].float(), alpha=-rate)

    def _adam(self, run: Run) -> None:
        group = self.param_groups[run.group]
        (b1, b2), step = group["betas"], self.step_of_run(run)
        lr = group["lr"] * group["adam_scale"]
        root = sqrt(1 - b2**step)
        p_N, g_N = run.param.view(-1), self.grad(run)
        m_N, v_N = (self.state[run.param][role].view(-1) for role in ("exp_avg", "exp_avg_sq"))
        for start, stop in chunks(run.numel, p_N.device):
            p, g, m, v = (x[start:stop] for x in (p_N, g_N, m_N, v_N))
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            if group["weight_decay"]:
                p.mul_(1 - lr * group["weight_decay"])
            p.addcdiv_(m, v.sqrt().div_(root).add_(group["eps"]), value=-lr / (1 - b1**step))

    def _buffer(self, numel: int) -> Tensor:
        if self.axis is None:
            return torch.zeros(numel, dtype=torch.bfloat16, device=self.device)
        return self.axis.zeros(numel, dtype=torch.bfloat16, device=self.device)


def _check_in_one_stage(tensors: Sequence[TensorInfo]) -> None:
    names = [info.name for info in tensors if info.over_stages is not None and is_matrix(info.name, info.shape)]
    if names:
        raise ModelError(
            "optimizer: Muon gathers a matrix over the ranks of one pipeline stage, and several stages share "
            + ", ".join(f"`{name}`" for name in names),
            hint="set `zero_optimization.stage` to 0, or let no two stages share these weights",
        )


def share_out(costs: Sequence[int], ranks: int) -> list[int]:
    """Returns the rank for each job: the costliest first, each to the rank that has least to do.

    Args:
        costs: cost of each job.
        ranks: number of ranks.
    """
    loads = [0] * ranks
    taken = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min(range(ranks), key=lambda index: (loads[index], index))
        loads[rank] += costs[job]
        taken[job] = rank
    return taken


def _windows(tensors: Sequence[TensorInfo], ranks: int) -> list[_Window]:
    """Groups the units that have matrices, in order, until each window has at least one for each rank."""
    units: dict[int, list[TensorInfo]] = {}
    for info in tensors:
        if is_matrix(info.name, info.shape):
            units.setdefault(id(info.layout), []).append(info)
    windows: list[_Window] = []
    members: list[list[TensorInfo]] = []
    for number, unit in enumerate(units.values()):
        members.append(unit)
        if sum(map(len, members)) >= ranks or number == len(units) - 1:
            windows.append(_window(members, ranks))
            members = []
    return windows


def _window(units: Sequence[Sequence[TensorInfo]], ranks: int) -> _Window:
    layouts = tuple(unit[0].layout for unit in units)
    starts = list(accumulate((layout.padded_numel for layout in layouts), initial=0))[:-1]
    infos = [(info, start + info.offset) for unit, start in zip(units, starts, strict=True) for info in unit]
    ranks_of = share_out([_flops(info.shape) for info, _ in infos], ranks)
    matrices = tuple((info, place, rank) for (info, place), rank in zip(infos, ranks_of, strict=True))
    return _Window(layouts, tuple(starts), matrices)


def _flops(shape: tuple[int, ...]) -> int:
    short, long = sorted((shape[0], prod(shape[1:])))
    return short * short * long
