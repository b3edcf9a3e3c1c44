"""Adafactor: of each matrix's second moment the means of rows and columns, and no first moment: hardly any state.

    R = mean over columns of g^2, C = mean over rows, each as a running mean with weight t^beta2_decay for the new one
    u = g / sqrt(max(R C / mean(R), eps1^2));   for tensors of one dimension the running mean of g^2 in place of R C
    p -= lr * wd * p;   p -= max(eps2, rms(p)) * min(lr, 1 / sqrt(t)) / max(1, rms(u) / d) * u

The means and both norms are exact over shards, see [Note: exact sums], and every rank keeps all R and C: a step enters
two all-reduces of one number a row and column of the model's matrices, and two of two numbers a tensor.

Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018); defaults and details as
in torch.optim.Adafactor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...layout.unit_layout import TENSOR_ALIGN, ShardPiece
from ...protocols import StateEntry
from ..structure.base import StructuredOptimizer, chunk_numel, elementwise_entries, whole_entry
from ..structure.blocks import block_parts
from ..structure.exact_sums import agree, cell_squares, finish, rounded
from ..structure.runs import Run

_MATRIX, _VECTOR = "matrix", "vector"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the means of a matrix stand in the vector of all means.

    Attributes:
        batches: matrices that the tensor is a batch of (dims before the last two).
        rows: number of rows of each matrix.
        columns: number of columns of each matrix.
        first_row: place of the first row's mean; batch by batch.
        first_column: place of the first column's mean; batch by batch.
    """

    batches: int
    rows: int
    columns: int
    first_row: int
    first_column: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """Whole or partial rows of a piece: `values` is [batches, rows, columns of them] of the flat piece.

    Attributes:
        offset: first element of the tile, counted from the start of the piece.
        shape: (batches, rows, columns).
        row_means: places of its rows' means, batches x rows.
        column_means: places of its columns' means in [batches, columns of the whole matrix].
        columns: columns of the matrix that the tile has.
    """

    offset: int
    shape: tuple[int, int, int]
    row_means: slice
    column_means: slice
    columns: slice


class Adafactor(StructuredOptimizer):
    """See the head of the file.

    Args:
        params: parameters or group dicts.
        lr: upper bound of the learning rate, which is the smaller of this and 1 / sqrt(t).
        beta2_decay: exponent of the weight of a new squared gradient.
        eps: (bound below on the root; None: fp32's epsilon, bound below on the scale of a tensor).
        d: largest rms of a step before scaling.
        weight_decay: weight decay, applied to the weights directly and not through the gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": tuple(eps), "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """See `StructuredOptimizer`: only what is no matrix keeps a state for each element."""
        return _MATRIX if len(shape) > 1 else _VECTOR

    def state_roles(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `StructuredOptimizer`."""
        return ("row_var", "col_var") if len(shape) > 1 else ("variance",)

    def state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """See `StructuredOptimizer`."""
        return 4.0 * prod(shape) if len(shape) < 2 else 4.0 * prod(shape[:-2]) * sum(shape[-2:]) * bool(prod(shape))

    def prepare(self) -> None:
        """See `StructuredOptimizer`."""
        for run in self.runs:
            own = {} if run.kind == _MATRIX else {"variance": torch.zeros_like(run.param.detach())}
            self.state[run.param] = own
        self._index = {info.name: number for number, info in enumerate(self.tensors)}
        self._places: dict[str, _Place] = {}
        terms: list[int] = []
        tensor_of: list[int] = []
        for number, info in enumerate(self.tensors):
            if len(info.shape) > 1 and info.numel:
                batches, (rows, columns) = prod(info.shape[:-2]), info.shape[-2:]
                first_row, first_column = len(terms), len(terms) + batches * rows
                self._places[info.name] = _Place(batches, rows, columns, first_row, first_column)
                terms += [columns] * (batches * rows) + [rows] * (batches * columns)
                tensor_of += [number] * (len(terms) - first_row)
        self._terms = torch.tensor(terms, dtype=torch.int64, device=self.device)
        self._means = torch.zeros(len(terms), device=self.device)
        self._term_ranks = self.ranks_of_sums(tensor_of)
        cells = [-(-info.numel // TENSOR_ALIGN) for info in self.tensors]
        self._norm_ranks = self.ranks_of_sums([*range(len(cells)), *range(len(cells))])
        self._cells = torch.tensor([cells, cells], dtype=torch.int64, device=self.device)
        numel = [max(1, info.numel) for info in self.tensors]
        self._numel = torch.tensor(numel, dtype=torch.float64, device=self.device)

    def update(self) -> None:
        """See `StructuredOptimizer`; four all-reduces."""
        self._advance_means()
        runs = self.stepped_runs
        for run in runs:
            if run.kind == _VECTOR:
                grad, weight = self.grad(run), self._weight_of_new(run.first_name, run.group)
                self.state[run.param]["variance"].view(-1).lerp_(grad * grad, weight)
        weights, steps = self._rms()
        for run in runs:
            group = self.param_groups[run.group]
            p_N = run.param.view(-1)
            rate = min(group["lr"], self.step_of_run(run) ** -0.5)
            scales = weights.clamp(min=group["eps"][1]) * rate / (steps / group["d"]).clamp(min=1.0)
            for piece in run.pieces():
                p = p_N.narrow(0, piece.shard_offset, piece.stop - piece.start)
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                # Two operations that round once each; see `with_gap`.
                p.sub_(self._direction(run, piece).mul_(scales[self._index[piece.extent.name]].float()))

    def entries(self) -> Iterator[StateEntry]:
        """See `StructuredOptimizer`: means of rows and columns are whole on every rank of a unit."""
        for run in self.runs:
            if run.kind == _VECTOR:
                variance = self.state[run.param]["variance"]
                yield from elementwise_entries(run, "variance", variance)
        for info in self.tensors:
            place = self._places.get(info.name)
            if place is None:
                continue
            rows, columns = place.batches * place.rows, place.batches * place.columns
            yield whole_entry(info, "row_var", self._means.narrow(0, place.first_row, rows))
            yield whole_entry(info, "col_var", self._means.narrow(0, place.first_column, columns))

    def state_tensors(self) -> Iterator[Tensor]:
        """See `StructuredOptimizer`."""
        yield from super().state_tensors()
        yield self._means

    def _weight_of_new(self, name: str, group: int) -> float:
        return self.step_of(name, group) ** self.param_groups[group]["beta2_decay"]

    def _advance_means(self) -> None:
        """Adds the squares of this step's gradients to the running means of rows and columns."""
        largest = torch.zeros(len(self._terms), dtype=torch.float64, device=self.device)
        totals = torch.zeros_like(largest)
        label = "Adafactor's rows and columns"
        for tile, squares_BRC, columns_BC in self._squares(largest):
            rows = largest[tile.row_means]
            torch.maximum(rows, squares_BRC.amax(dim=2).view(-1).double(), out=rows)
            torch.maximum(columns_BC, squares_BRC.amax(dim=1).double(), out=columns_BC)
        scales = agree(largest, self._terms, self._term_ranks, label=label)
        for tile, squares_BRC, columns_BC in self._squares(totals):
            batches, rows, _ = tile.shape
            row_scales = scales[tile.row_means].view(batches, rows, 1)
            totals[tile.row_means] += rounded(squares_BRC, row_scales).sum(dim=2).view(-1)
            column_scales = scales[tile.column_means].view(batches, -1)[:, None, tile.columns]
            columns_BC += rounded(squares_BRC, column_scales).sum(dim=1)
        means = (finish(totals, largest, scales, self._term_ranks, label=label) / self._terms).float()
        for info in self.stepped_tensors:
            place = self._places.get(info.name)
            if place is not None:
                stop = place.first_column + place.batches * place.columns
                weight = self._weight_of_new(info.name, info.group)
                self._means[place.first_row : stop].lerp_(means[place.first_row : stop], weight)

    def _squares(self, columns_K: Tensor) -> Iterator[tuple[_Tile, Tensor, Tensor]]:
        """Yields (tile, fp64 squares of its gradients [B, R, C], view of `columns_K` at its columns [B, C])."""
        for run in self.stepped_runs:
            if run.kind == _MATRIX:
                g_N = self.grad(run)
                for piece in run.pieces():
                    for tile in _tiles(piece, self._places[piece.extent.name], g_N.device):
                        part = g_N.narrow(0, piece.shard_offset + tile.offset, prod(tile.shape))
                        columns = columns_K[tile.column_means].view(tile.shape[0], -1)[:, tile.columns]
                        # A product of two fp32 numbers is exact in fp64.
                        yield tile, part.double().square_().view(tile.shape), columns

    def _rms(self) -> tuple[Tensor, Tensor]:
        """Returns the root mean squares of all tensors, and of their steps before scaling: two fp64 vectors."""
        label = "Adafactor's norms"
        largest = torch.zeros(self._cells.shape, dtype=torch.float64, device=self.device)
        totals = torch.zeros_like(largest)
        found: list[tuple[int, Tensor]] = []
        for run in self.stepped_runs:
            for piece in run.pieces():
                p = run.param.view(-1).narrow(0, piece.shard_offset, piece.stop - piece.start)
                cells_2C = torch.stack([cell_squares(p), cell_squares(self._direction(run, piece))])
                index = self._index[piece.extent.name]
                largest[:, index] = torch.maximum(largest[:, index], cells_2C.amax(dim=1).double())
                found.append((index, cells_2C))
        scales = agree(largest.view(-1), self._cells.view(-1), self._norm_ranks, label=label).view_as(largest)
        for index, cells_2C in found:
            totals[:, index] += rounded(cells_2C, scales[:, index : index + 1]).sum(dim=1)
        sums = finish(totals.view(-1), largest.view(-1), scales.view(-1), self._norm_ranks, label=label).view_as(
            largest
        )
        weights, steps = (sums / self._numel).sqrt_()
        return weights, steps

    def _direction(self, run: Run, piece: ShardPiece) -> Tensor:
        """Returns the step of a piece before scaling: flat, fp32, a new tensor."""
        eps = self.param_groups[run.group]["eps"][0]
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        numel = piece.stop - piece.start
        g_N = self.grad(run).narrow(0, piece.shard_offset, numel)
        if run.kind == _VECTOR:
            variance = self.state[run.param]["variance"].view(-1).narrow(0, piece.shard_offset, numel)
            return g_N / variance.clamp(min=eps * eps).sqrt_()
        place = self._places[piece.extent.name]
        rows_BR = self._means.narrow(0, place.first_row, place.batches * place.rows).view(place.batches, place.rows)
        factors = rows_BR.double().mean(dim=1, keepdim=True).clamp_(min=eps)
        rows = (rows_BR / factors).float().view(-1)
        result = torch.empty_like(g_N)
        for tile in _tiles(piece, place, g_N.device):
            batches, count, _ = tile.shape
            part = slice(tile.offset, tile.offset + prod(tile.shape))
            row_slice = slice(tile.row_means.start - place.first_row, tile.row_means.stop - place.first_row)
            columns = self._means[tile.column_means].view(batches, -1)[:, None, tile.columns]
            variance = rows[row_slice].view(batches, count, 1) * columns
            torch.div(
                g_N[part].view(tile.shape), variance.clamp_(min=eps * eps).sqrt_(), out=result[part].view(tile.shape)
            )
        return result


def _tiles(piece: ShardPiece, place: _Place, device: torch.device) -> Iterator[_Tile]:
    """Cuts a piece into tiles: whole matrices of a batch together, of one matrix the rows, in chunks for the cache."""
    matrix = place.rows * place.columns
    for parts in block_parts(piece.start, piece.stop, matrix):
        for first, stop in _in_chunks(parts.count, parts.length, device):
            number, offset = parts.first + first, parts.offset + first * parts.length
            column = place.first_column + number * place.columns
            columns = slice(column, column + (stop - first) * place.columns)
            row = place.first_row + number * place.rows
            if stop - first > 1:
                shape = (stop - first, place.rows, place.columns)
                rows = slice(row, row + (stop - first) * place.rows)
                yield _Tile(offset, shape, rows, columns, slice(0, place.columns))
            else:
                inside = piece.start + offset - number * matrix
                yield from _row_tiles(inside, inside + parts.length, place.columns, offset, row, columns, device)


def _row_tiles(
    start: int, stop: int, width: int, offset: int, first_row: int, columns: slice, device: torch.device
) -> Iterator[_Tile]:
    """Cuts the elements [start, stop) of one matrix with rows of `width`, which begin at `offset` in the piece."""
    for rows in block_parts(start, stop, width):
        left = (start + rows.offset) % width
        for first, last in _in_chunks(rows.count, rows.length, device):
            yield _Tile(
                offset + rows.offset + first * rows.length,
                (1, last - first, rows.length),
                slice(first_row + rows.first + first, first_row + rows.first + last),
                columns,
                slice(left, left + rows.length),
            )


def _in_chunks(count: int, numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Cuts [0, count) things of `numel` elements into ranges whose passes stay in the cache."""
    step = max(1, chunk_numel(device) // numel)
    for first in range(0, count, step):
        yield first, min(count, first + step)
