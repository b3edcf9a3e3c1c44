"""Adam and Lion with states of 8 bits: 2.03 or 1.02 bytes a parameter in place of 8 or 4.

States are coded by blocks of 256 elements of the flat buffer (see `codes`), which no shard cuts; a block is divided
only where a leaf begins inside of it. Tensors of fewer than `min_8bit_size` elements keep fp32 states: they cost little
and suffer most. The update reads the new states before they are coded, as bitsandbytes' kernels do:

    m = b1 * m + (1 - b1) * g;   v = b2 * v + (1 - b2) * g^2;   k = sqrt(1 - b2^t)
    p *= 1 - lr * wd;   p -= lr * k / (1 - b1^t) * m / (sqrt(v) + k * eps)

Plain torch operations on chunks that stay in the cache; on CUDA bitsandbytes' kernels where it is installed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from dsrun.checkpoint_files.index.region import uncut

from ...layout.unit_layout import ShardPiece
from ...protocols import StateEntry
from ..structure.base import StructuredOptimizer, chunks, elementwise_entries, with_gap
from ..structure.codes import BLOCK, dynamic_table
from ..structure.runs import Run
from .bitsandbytes_kernels import Kernels, update_coded, use_bitsandbytes

_CODED, _PLAIN = "8 bit", "32 bit"
_MIN_8BIT_SIZE = 4096


class CodedOptimizer(StructuredOptimizer):
    """What 8-bit optimizers have in common: where codes and scales are, and how they travel.

    Args:
        params: parameters or group dicts.
        defaults: hyperparameters.
        roles: names of the states; the first has values of both signs, the others are never negative.
        min_8bit_size: tensors of fewer elements keep fp32 states.
        kernels: kernels of the update: `auto`, `torch` or `bitsandbytes`; see `Kernels`.
    """

    #: What bitsandbytes calls the update.
    update_name: str

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        roles: tuple[str, ...],
        min_8bit_size: int,
        kernels: Kernels,
    ) -> None:
        super().__init__(params, defaults)
        self._roles = roles
        self._min_8bit_size = min_8bit_size
        self._kernels: Kernels = kernels

    @abstractmethod
    def move(self, p_N: Tensor, g_N: Tensor, states: list[Tensor], group: dict[str, Any]) -> None:
        """Updates fp32 weights and states in place, all of the same shape.

        Args:
            p_N: weights.
            g_N: gradients; read only.
            states: state tensors in the order of the roles.
            group: hyperparameters, with `step` from 1 on.
        """

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """See `StructuredOptimizer`."""
        return _CODED if prod(shape) >= self._min_8bit_size else _PLAIN

    def takes_parts(self, name: str, shape: tuple[int, ...]) -> bool:
        """See `StructuredOptimizer`: where states are fp32; blocks of a part are not those of the whole tensor."""
        return self.kind_of(name, shape) == _PLAIN

    def state_roles(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `StructuredOptimizer`."""
        if self.kind_of(name, shape) == _PLAIN:
            return self._roles
        return tuple(f"{role}_{part}" for role in self._roles for part in ("codes", "scales"))

    def state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """See `StructuredOptimizer`."""
        each = 4.0 if self.kind_of(name, shape) == _PLAIN else 1 + 4 / BLOCK
        return each * len(self._roles) * prod(shape)

    def prepare(self) -> None:
        """See `StructuredOptimizer`: for each state a byte an element of whole blocks, and a scale a block."""
        self._uses_bitsandbytes = use_bitsandbytes(self._kernels, self.device)
        self._tables = [dynamic_table(signed=i == 0, device=self.device) for i in range(len(self._roles))]
        for run in self.runs:
            state: dict[str, Tensor] = {}
            for role, table in zip(self._roles, self._tables, strict=True):
                if run.kind == _PLAIN:
                    state[role] = torch.zeros_like(run.param.detach())
                    continue
                blocks = -(-(run.start % BLOCK + run.numel) // BLOCK)
                state[f"{role}_codes"] = torch.full(
                    (blocks * BLOCK,), table.zero, dtype=torch.uint8, device=self.device
                )
                state[f"{role}_scales"] = torch.zeros(blocks, device=self.device)
            self.state[run.param] = state

    def update(self) -> None:
        """See `StructuredOptimizer`; nothing is communicated."""
        for run in self.stepped_runs:
            group, state = self.param_groups[run.group], self.state[run.param]
            if group.get("missed"):
                group = {**group, "step": self.step_of_run(run)}
            p_N, g_N = run.param.view(-1), self.grad(run)
            if run.kind == _CODED:
                self._update_coded(run, p_N, g_N, group)
                continue
            for start, stop in chunks(run.numel, p_N.device):
                states = [state[role].view(-1)[start:stop] for role in self._roles]
                self.move(p_N[start:stop], g_N[start:stop], states, group)

    def part_of_state(self, run: Run, part: Run, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `StructuredOptimizer`: a block that two parts share is there twice, with zeros around each one's own."""
        if run.kind == _PLAIN:
            return super().part_of_state(run, part, state)
        first, head = part.start // BLOCK - run.start // BLOCK, part.start % BLOCK
        blocks = -(-(head + part.numel) // BLOCK)
        found: dict[str, Any] = {}
        for role, table in zip(self._roles, self._tables, strict=True):
            codes = state[f"{role}_codes"].narrow(0, first * BLOCK, blocks * BLOCK).clone()
            codes[:head] = codes[head + part.numel :] = table.zero
            found[f"{role}_codes"] = codes
            found[f"{role}_scales"] = state[f"{role}_scales"].narrow(0, first, blocks).clone()
        return found

    def entries(self) -> Iterator[StateEntry]:
        """See `StructuredOptimizer`: the scales of a tensor are those of all blocks that it has elements in."""
        for run in self.runs:
            state = self.state[run.param]
            head = run.start % BLOCK
            for role in self._roles:
                if run.kind == _PLAIN:
                    yield from elementwise_entries(run, role, state[role])
                    continue
                codes = state[f"{role}_codes"].narrow(0, head, run.numel)
                yield from elementwise_entries(run, f"{role}_codes", codes)
                for piece in run.pieces():
                    yield scales_entry(run, piece, f"{role}_scales", state[f"{role}_scales"])

    def _update_coded(self, run: Run, p_N: Tensor, g_N: Tensor, group: dict[str, Any]) -> None:
        state, head = self.state[run.param], run.start % BLOCK
        codes = [state[f"{role}_codes"].view(-1, BLOCK) for role in self._roles]
        scales = [state[f"{role}_scales"] for role in self._roles]
        if self._uses_bitsandbytes and not head:  # its blocks begin where the leaf does
            flat = [whole.view(-1).narrow(0, 0, run.numel) for whole in codes]
            update_coded(self.update_name, p_N.detach(), g_N, flat, scales, self._tables, group)
            for piece in run.pieces():  # its code of 0 may stand for less than 0, and gaps hold zeros
                stop = piece.shard_offset + piece.stop - piece.start
                p_N[stop : piece.shard_offset + with_gap(piece, run)] = 0.0
            return
        for start, stop in chunks(codes[0].numel(), p_N.device):
            blocks = slice(start // BLOCK, stop // BLOCK)
            states = [t.decode(c[blocks], s[blocks]) for t, c, s in zip(self._tables, codes, scales, strict=True)]
            # The run's first block may begin before it, and its last end behind it; what is there is zero and stays so.
            first, last = max(start, head), min(stop, head + run.numel)
            own = slice(first - head, last - head)
            inside = [values.view(-1)[first - start : last - start] for values in states]
            self.move(p_N[own], g_N[own], inside, group)
            for table, values, c, s in zip(self._tables, states, codes, scales, strict=True):
                table.encode(values, c[blocks], s[blocks])


class Adam8bit(CodedOptimizer):
    """Adam with 8-bit states, weight decay apart from the gradient; see the head of the file.

    Args:
        params: parameters or group dicts.
        lr: learning rate.
        betas: decay of the running means of gradient and squared gradient.
        eps: number added to the square root of the bias-corrected second moment.
        weight_decay: weight decay, applied to the weights directly and not through the gradient.
        min_8bit_size: tensors of fewer elements keep fp32 states.
        kernels: kernels of the update: `auto`, `torch` or `bitsandbytes`; see `Kernels`.
    """

    update_name = "adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_8bit_size: int = _MIN_8BIT_SIZE,
        kernels: Kernels = "auto",
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, roles=("exp_avg", "exp_avg_sq"), min_8bit_size=min_8bit_size, kernels=kernels
        )

    def move(self, p_N: Tensor, g_N: Tensor, states: list[Tensor], group: dict[str, Any]) -> None:
        """See `CodedOptimizer`."""
        (b1, b2), step, lr = group["betas"], group["step"], group["lr"]
        m, v = states
        root = sqrt(1 - b2**step)
        m.lerp_(g_N, 1 - b1)
        v.mul_(b2).addcmul_(g_N, g_N, value=1 - b2)
        if group["weight_decay"]:
            p_N.mul_(1 - lr * group["weight_decay"])
        p_N.addcdiv_(m, v.sqrt().add_(root * group["eps"]), value=-lr * root / (1 - b1**step))


class Lion8bit(CodedOptimizer):
    """Lion with an 8-bit state; see `Lion`.

    Args:
        params: parameters or group dicts.
        lr: learning rate.
        betas: weights of the mean in the step, and in the next mean.
        weight_decay: weight decay, applied to the weights directly and not through the gradient.
        min_8bit_size: tensors of fewer elements keep fp32 states.
        kernels: kernels of the update: `auto`, `torch` or `bitsandbytes`; see `Kernels`.
    """

    update_name = "lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        min_8bit_size: int = _MIN_8BIT_SIZE,
        kernels: Kernels = "auto",
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, roles=("exp_avg",), min_8bit_size=min_8bit_size, kernels=kernels)

    def move(self, p_N: Tensor, g_N: Tensor, states: list[Tensor], group: dict[str, Any]) -> None:
        """See `CodedOptimizer`."""
        (b1, b2), lr = group["betas"], group["lr"]
        (m,) = states
        if group["weight_decay"]:
            p_N.mul_(1 - lr * group["weight_decay"])
        p_N.add_(torch.lerp(g_N, m, b1).sign_(), alpha=-lr)
        m.lerp_(g_N, 1 - b2)


def scales_entry(run: Run, piece: ShardPiece, role: str, scales: Tensor) -> StateEntry:
    """Returns the scales of a piece's blocks; two tensors may share a block, and then both have its scale.

    Only of a tensor that is not cut over ranks: a part has other blocks than the whole tensor.

    Args:
        run: run that contains the piece.
        piece: piece of a tensor that lies in the run.
        role: role of the scales in a checkpoint.
        scales: fp32, one a block that the run has elements in.
    """
    extent = piece.extent
    assert not extent.whole.is_cut, f"`{extent.name}` is whole: who binds an optimizer has looked"
    grid = extent.offset // BLOCK
    count = (extent.offset + extent.numel - 1) // BLOCK - grid + 1
    first = (extent.offset + piece.start) // BLOCK
    stop = (extent.offset + piece.stop - 1) // BLOCK + 1
    own = scales.narrow(0, first - run.start // BLOCK, stop - first)
    return StateEntry(extent.name, role, uncut((count,)), first - grid, stop - grid, own, run.owned.holders)
