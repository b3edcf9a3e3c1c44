"""Adam-mini: Adam with one second moment for each block of a tensor: half of Adam's state.

Blocks are rows (output neurons; tokens of embeddings and of the output layer), whole heads of query and key where their
number is given, and whole tensors of one dimension.

    m = b1 * m + (1 - b1) * g;   v_b = b2 * v_b + (1 - b2) * mean(g_b^2)
    p -= lr * wd * p;   p -= lr / (1 - b1^t) * m / (sqrt(v_b / (1 - b2^t)) + eps)

The means are exact over shards, see [Note: exact sums], and every rank keeps all of them, for there are few: a step
enters two all-reduces of one number a block of the model.

Source: Zhang et al., Adam-mini: Use Fewer Learning Rates To Gain More (2025), algorithms 1 to 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...layout.unit_layout import ShardPiece
from ...protocols import StateEntry
from ..structure.base import StructuredOptimizer, chunks, whole_entry
from ..structure.blocks import block_parts, cell_width
from ..structure.exact_sums import agree, cell_squares, finish, rounded
from ..structure.runs import Run

_OF = "Adam-mini's second moments"
#: How modules of queries and keys are called: Hugging Face, Llama, BERT, GPT-NeoX style.
_QUERIES = ("q_proj", "wq", "query", "q")
_KEYS = ("k_proj", "wk", "key", "k")


class AdamMini(StructuredOptimizer):
    """See the head of the file.

    Args:
        params: parameters or group dicts.
        lr: learning rate.
        betas: decay of the running means of gradient and squared gradient.
        eps: number added to the square root of the bias-corrected second moment.
        weight_decay: weight decay, applied to the weights directly and not through the gradient.
        num_heads: query heads of a layer; None: queries and keys are cut into rows, which keeps more state.
        num_kv_heads: key heads of a layer; None: as many.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads or num_heads

    def block_size(self, name: str, shape: tuple[int, ...]) -> int:
        """Returns how many neighbouring elements of a tensor share a second moment.

        Args:
            name: qualified name of the tensor.
            shape: shape of the whole tensor.

        Raises:
            ModelError: heads do not divide the rows of a query or key.
        """
        if len(shape) < 2:
            return max(1, prod(shape))
        rows = shape[0]
        module = name.split(".")[-2] if name.count(".") else name
        heads = self._num_heads if module in _QUERIES else self._num_kv_heads if module in _KEYS else None
        if heads is None:
            return max(1, prod(shape[1:]))
        if rows % heads:
            raise ModelError(
                f"optimizer.params: `{name}` has {rows} rows, which {heads} heads do not divide",
                hint="set `num_heads` and `num_kv_heads` to those of the model, or leave them out",
            )
        return rows // heads * prod(shape[1:])

    def state_roles(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `StructuredOptimizer`."""
        return "exp_avg", "exp_avg_sq_blocks"

    def state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """See `StructuredOptimizer`."""
        return 4.0 * prod(shape) + 4.0 * (prod(shape) // self.block_size(name, shape))

    def prepare(self) -> None:
        """See `StructuredOptimizer`: one fp32 state an element, and one a block of the whole model."""
        for run in self.runs:
            self.state[run.param] = {"exp_avg": torch.zeros_like(run.param.detach())}
        self._size = {info.name: self.block_size(info.name, info.shape) for info in self.tensors}
        self._first: dict[str, int] = {}
        counts: list[int] = []
        tensor_of: list[int] = []
        for number, info in enumerate(self.tensors):
            self._first[info.name] = len(counts)
            size = self._size[info.name]
            counts += [size // cell_width(size)] * (info.numel // size)
            tensor_of += [number] * (info.numel // size)
        self._ranks = self.ranks_of_sums(tensor_of)
        self._counts = torch.tensor(counts, dtype=torch.int64, device=self.device)
        self._elements = torch.tensor(
            [self._size[info.name] for info in self.tensors for _ in range(info.numel // self._size[info.name])],
            dtype=torch.float64,
            device=self.device,
        )
        self._means = torch.zeros(len(counts), device=self.device)

    def update(self) -> None:
        """See `StructuredOptimizer`; two all-reduces of one number a block."""
        runs = self.stepped_runs
        squares = [(run, self.grad(run)) for run in runs]
        largest = torch.zeros_like(self._elements)
        totals = torch.zeros_like(largest)
        for run, g_N in squares:
            for blocks, cells_BC in self._cells(run, g_N):
                largest[blocks] = torch.maximum(largest[blocks], cells_BC.amax(dim=1).double())
        scales = agree(largest, self._counts, self._ranks, label=_OF)
        for run, g_N in squares:
            for blocks, cells_BC in self._cells(run, g_N):
                totals[blocks] += rounded(cells_BC, scales[blocks].unsqueeze(1)).sum(dim=1)
        means = (finish(totals, largest, scales, self._ranks, label=_OF) / self._elements).float()
        for info in self.stepped_tensors:
            first, count = self._first[info.name], info.numel // self._size[info.name]
            decay = self.param_groups[info.group]["betas"][1]
            self._means[first : first + count].mul_(decay).add_(means[first : first + count], alpha=1 - decay)
        for run in runs:
            self._apply(run)

    def entries(self) -> Iterator[StateEntry]:
        """See `StructuredOptimizer`: second moments are whole on every rank of a unit."""
        yield from super().entries()
        for info in self.tensors:
            first, count = self._first[info.name], info.numel // self._size[info.name]
            yield whole_entry(info, "exp_avg_sq_blocks", self._means[first : first + count])

    def state_tensors(self) -> Iterator[Tensor]:
        """See `StructuredOptimizer`."""
        yield from super().state_tensors()
        yield self._means

    def _cells(self, run: Run, values_N: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields (blocks of the model, squares of cells [blocks, cells of each]) for each part of the run."""
        for piece in run.pieces():
            name, part = piece.extent.name, values_N.narrow(0, piece.shard_offset, piece.stop - piece.start)
            size = self._size[name]
            width = cell_width(size)
            cells = cell_squares(part, width)
            for found in block_parts(piece.start, piece.stop, size):
                first = self._first[name] + found.first
                taken = cells.narrow(0, found.offset // width, found.count * found.length // width)
                yield slice(first, first + found.count), taken.view(found.count, -1)

    def _apply(self, run: Run) -> None:
        group = self.param_groups[run.group]
        (b1, b2), step = group["betas"], self.step_of_run(run)
        p_N, g_N, m_N = run.param.view(-1), self.grad(run), self.state[run.param]["exp_avg"].view(-1)
        decay = 1 - group["lr"] * group["weight_decay"]
        for start, stop in chunks(p_N.numel(), p_N.device):
            m_N[start:stop].lerp_(g_N[start:stop], 1 - b1)
            if decay != 1:
                p_N[start:stop].mul_(decay)
        rates = (self._means / (1 - b2**step)).sqrt_().add_(group["eps"]).reciprocal_()
        rates.mul_(group["lr"] / (1 - b1**step))
        for piece in run.pieces():
            self._move(piece, p_N, m_N, rates)

    def _move(self, piece: ShardPiece, p_N: Tensor, m_N: Tensor, rates: Tensor) -> None:
        name = piece.extent.name
        for part in block_parts(piece.start, piece.stop, self._size[name]):
            first, offset = self._first[name] + part.first, piece.shard_offset + part.offset
            p_BL = p_N.narrow(0, offset, part.count * part.length).view(part.count, part.length)
            m_BL = m_N.narrow(0, offset, part.count * part.length).view(part.count, part.length)
            # Two operations that round once each: a fused one may round otherwise on a vector's tail, and where tails
            # are depends on how the tensor is cut.
            p_BL.sub_(m_BL * rates[first : first + part.count].unsqueeze(1))
