"""Parameters between their construction and `dsrun.initialize`: a rank keeps a slice of each and no whole one.

When parameters are taken and which ones, is decided in `construct.py` and `meta.py`; units are not known yet here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ...compat import unseen_by_modes
from ...mesh.collectives import Collectives, own_slice
from ..partition_parameters import (
    OwnerGroup,
    ParameterOwner,
    ZeroParamStatus,
    home_of,
    memory_of,
    set_memory,
    settle,
    unsettle,
)
from ..units.released import ReleasedParameter


class UnbuiltOwner(ParameterOwner):
    """ParameterOwner of a parameter that no engine has yet.

    Attributes:
        nursery: nursery that keeps the parameter.
        param: the parameter. Its data has the whole shape, and NaN in memory of one element, unless it is open.
        piece: this rank's slice of the flat values, in the parameter's dtype; the last slices may be padded.
        opened: number of `open` calls on the parameter that are not closed yet.
        writers: number of `open` calls on the parameter, not closed yet, that take new values over.
        changed: number of times that the parameter was given new values while it was not open.
    """

    def __init__(self, nursery: UnbuiltParameters, param: nn.Parameter, *, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.nursery = nursery
        self.param = param
        self.piece = torch.empty(0)
        self.opened = 0
        self.writers = 0
        self.changed = 0

    @property
    def keeper(self) -> UnbuiltParameters:
        """See `ParameterOwner`."""
        return self.nursery

    def status(self) -> ZeroParamStatus:
        """See `ParameterOwner`."""
        return ZeroParamStatus.AVAILABLE if self.opened else ZeroParamStatus.NOT_AVAILABLE

    @property
    def is_open(self) -> bool:
        """See `ParameterOwner`."""
        return self.opened > 0

    @property
    def is_writable(self) -> bool:
        """See `ParameterOwner`."""
        return self.writers > 0

    def read(self) -> Tensor:
        """See `ParameterOwner`: an all-gather, and no gradient, for nothing trains yet."""
        with unseen_by_modes(), torch.inference_mode(mode=False), torch.no_grad():
            return self.nursery.whole(self).to(self.param.device)

    def write(self, value: Tensor) -> None:
        """See `ParameterOwner`: with rank 0's value, as all first values are; one broadcast."""
        self.changed += 1
        with unseen_by_modes(), torch.no_grad():
            self.nursery.take_value(self, value)

    def replace(self, value: Tensor) -> None:
        """See `ParameterOwner`: in its dtype, on its device."""
        self.write(value)

    def moment(self) -> tuple[int, int]:
        """See `ParameterOwner`."""
        return (0, self.changed)

    @property
    def own_range(self) -> tuple[int, int]:
        """[start, stop) of the flat values that `piece` begins with; the rest of it is padding."""
        start = self.nursery.collectives.rank * self.piece.numel()
        return min(start, self.param.numel()), min(start + self.piece.numel(), self.param.numel())

    def own_piece(self) -> Tensor:
        """See `ParameterOwner`."""
        start, stop = self.own_range
        return self.piece.narrow(0, 0, stop - start)


class UnbuiltParameters(OwnerGroup):
    """Keeps parameters in slices, one a rank.

    Args:
        collectives: the axis the slices lie on.
        device: device that whole values are gathered on; slices live there too, unless `on_host`.
        dtype: dtype that floating-point parameters are converted to when they are taken; None: they keep their own.
        on_host: slices live in host memory, so the device need not have room for them.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        on_host: bool = False,
    ) -> None:
        self.collectives = collectives
        self.device = device
        self._dtype = dtype
        self._home = torch.device("cpu") if on_host else device
        self._taken = 0

    @property
    def world_size(self) -> int:
        """See `OwnerGroup`."""
        return self.collectives.size

    def take(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Takes parameters over with rank 0's values, one broadcast each; those that have a home are left alone."""
        for name, param in named:
            if home_of(param) is not None:
                continue
            home = UnbuiltOwner(self, param, number=self._taken, name=name)
            self._taken += 1
            if self._dtype is not None and param.is_floating_point():
                set_memory(param, memory_of(param).to(self._dtype))
            whole = memory_of(param).to(self.device).contiguous().view(-1)
            if whole.numel():
                self.collectives.broadcast(whole, source=0, label=f"`{name}`").wait()
            self._cut(home, whole)

    def open(self, homes: Sequence[UnbuiltOwner], *, writes: bool) -> None:
        """See `OwnerGroup`; an all-gather a parameter."""
        with unseen_by_modes():  # else a `WholeDuringCalls` would see the parameters touched, and open them itself
            for home in homes:
                if not home.opened:
                    # Where the model is built, which may be elsewhere: there random numbers are the plain model's.
                    set_memory(home.param, self.whole(home).to(home.param.device))
                    # An ordinary parameter for as long: others may be made of it, which torch refuses of subclasses.
                    settle(home.param, home, sharded=False)
                home.opened += 1
                home.writers += writes

    def close(self, homes: Sequence[UnbuiltOwner], *, source: int | None, failed: bool) -> None:
        """See `OwnerGroup`; with a source, an all-reduce of one number and a broadcast a parameter."""
        with unseen_by_modes():
            self._close(homes, source=source, failed=failed)

    def _close(self, homes: Sequence[UnbuiltOwner], *, source: int | None, failed: bool) -> None:
        taken_over = source is not None and not self._gave_up(failed)
        for home in homes:
            home.opened -= 1
            home.writers -= source is not None
            if taken_over and home.param.numel():
                assert source is not None, "checked just now"
                flat = memory_of(home.param).to(self.device).contiguous().view(-1)
                self.collectives.broadcast(flat, source=source, label=f"`{home.name}`").wait()
                if home.opened:
                    memory_of(home.param).copy_(flat.view(home.param.shape))
                self._cut(home, flat, release=not home.opened)
            elif not home.opened:
                self._release(home)

    def whole(self, home: UnbuiltOwner) -> Tensor:
        """Returns the parameter's whole values in memory of their own; an all-gather.

        Raises:
            ModelError: the parameter was written to while it was not open.
        """
        memory = memory_of(home.param)
        marked = memory.is_floating_point() and memory.numel() and not home.opened
        if marked and not bool(memory.view(-1)[:1].isnan()):
            raise ModelError(
                f"model: `{home.name}` was written to while its values were sharded, so they were lost",
                hint="write to it inside dsrun.zero.Init, or inside dsrun.zero.GatheredParameters(param, "
                "modifier_rank=0)",
            )
        flat = torch.empty(home.piece.numel() * self.world_size, dtype=home.piece.dtype, device=self.device)
        if flat.numel():
            self.collectives.all_gather(flat, home.piece.to(self.device), label=f"`{home.name}`").wait()
        values = flat.narrow(0, 0, home.param.numel()).view(home.param.shape)
        return values.to(home.param.dtype)  # `model.bfloat16()` has reached the parameter, not its slices

    def take_value(self, home: UnbuiltOwner, value: Tensor) -> None:
        """Gives a parameter that is not open a new value, rank 0's, in its dtype and on its device; every rank calls.

        Args:
            home: home of the parameter.
            value: whole.
        """
        flat = value.detach().to(self.device).contiguous().view(-1)
        if flat.numel():
            self.collectives.broadcast(flat, source=0, label=f"`{home.name}`").wait()
        set_memory(home.param, value.detach())
        self._cut(home, flat)

    def give(self, home: UnbuiltOwner) -> Tensor:
        """Returns the whole values as `whole` does, and lets go of the parameter, which is without a home then."""
        values = self.whole(home)
        home.piece = torch.empty(0)
        unsettle(home.param)
        return values

    def _cut(self, home: UnbuiltOwner, flat: Tensor, *, release: bool = True) -> None:
        size = -(-flat.numel() // self.world_size)
        padded = flat.new_zeros(size * self.world_size) if size * self.world_size != flat.numel() else flat
        if padded is not flat:
            padded.narrow(0, 0, flat.numel()).copy_(flat)
        piece = own_slice(padded, rank=self.collectives.rank, size=self.world_size)
        with self.collectives.reading(f"`{home.name}`"):  # where slices are kept on the host
            home.piece = piece.to(self._home, copy=True)
        if release:
            self._release(home)

    def _release(self, home: UnbuiltOwner) -> None:
        set_memory(home.param, _placeholder(memory_of(home.param)))
        settle(home.param, home, sharded=True, kind=ReleasedParameter)

    def _gave_up(self, failed: bool) -> bool:
        outcome = torch.tensor([int(failed)], device=self.device)
        self.collectives.all_reduce(outcome, op="max", label="GatheredParameters outcome").wait()
        with self.collectives.reading("GatheredParameters outcome"):
            return bool(outcome.item())


def _placeholder(param: Tensor) -> Tensor:
    """Returns a tensor of the whole shape in the memory of one element: reads show NaN, and writes are refused."""
    filler = float("nan") if param.is_floating_point() or param.is_complex() else 0
    return torch.full((1,), filler, dtype=param.dtype, device=param.device).expand(param.shape)
