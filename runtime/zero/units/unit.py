"""A unit with its memory: flat buffers, the parameters and gradients that view them, and the slice this rank owns.

Which buffers are whole and which are slots is decided by the store and the reducer; nothing is communicated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...compat import without_overrides
from ...layout.unit_layout import UnitLayout, lay_out
from ...mesh.collectives import Collectives
from ...protocols import SOLE_HOLDER, Holders, OwnedRange, Window
from ..partition_parameters import EngineParameter, set_memory
from .find import UnitSpec
from .released import PendingParameter
from .tier import ShardTier
from .write_watch import WriteWatch


class PendingUpdate(Protocol):
    """An update that goes on behind its step, and brings units their parameters one by one."""

    def wait(self, index: int) -> None:
        """Returns when what the device is given next finds this unit's new parameters in `shard`, or whole."""
        ...

    def settle(self) -> None:
        """Returns when the whole update is done, masters and optimizer states included."""
        ...


class MasterHalves(Protocol):
    """Masters that lie in two halves, the upper one in `shard`: whole for a while where somebody asks."""

    def joined(self) -> Tensor:
        """Returns the masters in fp32, a copy."""
        ...

    def part(self, values_N: Tensor) -> None:
        """Takes new masters, fp32; `shard` has them rounded from here on."""
        ...

    def buffers(self) -> list[Tensor]:
        """Returns the memory of the lower halves."""
        ...


class ParamUnit:
    """Parameters that are gathered, reduced and updated together.

    Attributes:
        index: position among the units, in order of registration.
        label: number and name of the unit, as messages about waits show them; the name alone where several stages
            have it.
        module: module that uses the parameters in its forward; None for the rest unit.
        twins: other modules whose forwards use the same parameters.
        comm_dtype: dtype that gradients travel in; None: that of all others.
        params: the model's parameters, in the order of `layout.extents`.
        placement: axes of ranks that the parameters are no plain replicas along.
        replicas: ranks that hold the same elements: they share out its state and sum up its gradients.
        ties: ranks of `replicas` with the same samples, where several stages use the parameters: a sum over them first
            has the bits of one rank with all uses. None where these are all of `replicas`.
        divide_before: divisor of gradients before they are summed over `replicas`, in the dtype that travels:
            it keeps sums of 16-bit gradients over many ranks from overflowing.
        divide_by: total divisor of the sum of gradients over `replicas`.
        layout: places in the flat buffers, see [Note: flat buffers].
        owned: [start, stop) of the flat buffer that this rank updates: its slice, or everything at stage 0.
        counted: [start, stop) of the owned range that this rank counts in sums over all ranks, such as the norm's: of
            the ranks that own an element one counts it. None: all of it, for no other rank has it, or all ranks of the
            job have everything and nothing is summed.
        repeats_over: axes with several ranks that `replicas` lie on.
        flat_param: compute dtype, [padded_numel]; the parameters are views of it. Whole and always valid, or the
            memory of a slot, valid between acquire and release.
        flat_grad: compute dtype, [padded_numel]; the gradients are views of it. Its own, or the memory of a slot.
        shard: compute dtype, this rank's slice of the parameters; a view of `flat_param` unless that is a slot.
        tier: tier that holds `shard` where that is not on the device; None where it is.
        master: the owned range as the optimizer updates it, fp32 or as the config says; shares memory with the
            parameters if they have that dtype.
        halves: holder of the values of `master`, where these lie in two halves and `master` is a shape alone; None:
            `master` has them.
        grad_sum: owned range of the gradient, reduced over ranks and summed over micro batches, in fp32 or as the
            config says. Empty where the optimizer steps elsewhere and a separate `GradSums` has the sum.
        steps_on_host: its masters are in host memory or on a disk, and stepped there.
        pending_update: update that brings the parameters new values, where it may go on behind its step; None: the
            values are there.
        window: memory in another dtype through which the optimizer sees the owned range, shared by all units of one
            parameter dtype; None where it needs none.
        trains: False for a unit of frozen parameters, which has no gradients and no optimizer state.
        frozen: unit of the frozen parameters of the same module that is gathered and dropped with this one; None where
            there are none, or they are whole on every rank.
        shown: those of `gathered_params` that have a class of ours, which `show` changes.
        writes: sees what scripts write to the parameters.
        on_write: callback that gets the unit and the positions of gathered parameters that were written to, before
            their memory is given up; None: the parameters are always there.
        without_grad: positions of parameters that have got no gradient since somebody set this, see `look_for_grads`.
    """

    def __init__(self, spec: UnitSpec, replicas: Collectives, *, index: int, trains: bool = True) -> None:
        self.index = index
        self.trains = trains
        self.frozen: ParamUnit | None = None
        # Stages count their units apart: of what they have in common they must say the same.
        self.label = f"unit `{spec.name}`" if spec.placement.stages else f"unit {index} `{spec.name}`"
        self.name = spec.name
        self.module = spec.module
        self.twins = spec.twins
        self.comm_dtype = spec.comm_dtype
        self.params = [param for _, param in spec.params]
        self.placement = spec.placement
        self.replicas = replicas
        self.ties: Collectives | None = None
        self.divide_before, self.divide_by = 1.0, float(replicas.size)
        self.layout: UnitLayout = lay_out(
            spec.name,
            [(name, param.shape) for name, param in spec.params],
            world_size=replicas.size,
            cut=spec.boxes,
        )
        self.owned: tuple[int, int] = (0, 0)
        self.counted: tuple[int, int] | None = None
        self.repeats_over: tuple[str, ...] = ("data",)
        empty = torch.empty(0)
        self.flat_param = empty
        self.flat_grad = empty
        self.shard = empty
        self.tier: ShardTier | None = None
        self.steps_on_host = False
        self.master = empty
        self.halves: MasterHalves | None = None
        self.grad_sum = empty
        self.window: Window | None = None
        self.pending_update: PendingUpdate | None = None
        self.shown: list[Any] = []
        self._is_pending = False
        self.writes = WriteWatch(self.params)
        self.on_write: Callable[[ParamUnit, Sequence[int]], None] | None = None
        self._grad_views: list[Tensor] = []
        self._with_views: list[tuple[nn.Parameter, Tensor]] = []
        self._versions: list[int] = []
        self.without_grad: Sequence[int] = ()

    @property
    def device(self) -> torch.device:
        """Where the parameters are used."""
        return self.params[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters in forward and backward."""
        return self.params[0].dtype

    @property
    def gathered_params(self) -> list[nn.Parameter]:
        """All parameters that are there while the unit is in use: its own, then those of `frozen`."""
        return self.params if self.frozen is None else [*self.params, *self.frozen.params]

    @property
    def meeting_order(self) -> tuple[bool, str]:
        """Place among units whose collectives all ranks enter in one order, by index where it is the same.

        What several pipeline stages share comes last, by name: stages count their units apart.
        """
        return bool(self.placement.stages), self.layout.extents[0].name if self.placement.stages else ""

    @property
    def ranks(self) -> Holders:
        """All ranks that the unit is cut over, or that own it whole."""
        return Holders(self.repeats_over, self.replicas.rank, self.replicas.size, self.placement.stages)

    @property
    def cut_names(self) -> list[str]:
        """Names of the parameters of which other ranks hold other parts: all of the unit's, or none."""
        return [extent.name for extent in self.layout.extents] if self.placement.cut_over else []

    @property
    def holders(self) -> Holders:
        """The ranks that own the same range: this rank alone, or all of `ranks` at stage 0."""
        return self.ranks if self.owned == (0, self.layout.padded_numel) else SOLE_HOLDER

    def owned_range(self, group_of: Mapping[int, int]) -> OwnedRange:
        """Returns what this rank updates; `group_of` gives the optimizer group of each parameter by its id."""
        groups = tuple(group_of[id(param)] for param in self.params)
        # Leaves that are stepped on the host have no gradient: one zero in the shape of all of them.
        sums = self.grad_sum if self.grad_sum.numel() else self.master.new_zeros(1).expand(self.master.numel())
        return OwnedRange(
            self.layout,
            self.owned[0],
            self.master,
            sums,
            groups,
            self.window,
            holders=self.holders,
            ranks=self.ranks,
            over_stages=(self.ties or self.replicas) if self.placement.stages else None,
        )

    def whole_master(self) -> Tensor:
        """Returns the values of `master`: itself, or a copy where it lies in halves, to be put back by `part`."""
        return self.master if self.halves is None else self.halves.joined()

    def wait_update(self) -> None:
        """Returns when the parameters may be read where they lie; see `PendingUpdate`."""
        if self.pending_update is not None:
            self.pending_update.wait(self.index)
            if self._is_pending:
                self._is_pending = False
                self.show(EngineParameter)

    def expect_values(self) -> None:
        """An update brings the parameters new values where they lie: who reads one waits, see `PendingParameter`."""
        self._is_pending = True
        self.show(PendingParameter)

    def show(self, kind: type[nn.Parameter]) -> None:
        """Gives the parameters that are gathered together the class that says where their values are."""
        for param in self.shown:
            param.__class__ = kind

    def settle(self) -> None:
        """Returns when nothing works on the parameters, masters or states behind the last step; see `PendingUpdate`."""
        if self.pending_update is not None:
            self.pending_update.settle()

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """Returns a view of `flat_N` for each parameter, in its shape."""
        return [flat_N.narrow(0, e.offset, e.numel).view(e.shape) for e in self.layout.extents]

    def bind_params(self, flat_N: Tensor) -> None:
        """Makes the parameters views of `flat_N`, once and for all: the addresses never change again."""
        self.flat_param = flat_N
        for param, view in zip(self.params, self.views(flat_N), strict=True):
            set_memory(param, view)

    def bind_grads(self, flat_N: Tensor) -> None:
        """Says where the gradients are when they are attached: in views of `flat_N`."""
        self.look_for_grads()
        self.flat_grad = flat_N
        # Each counts by itself how often it was written to: views as such count with the tensor that they are of.
        self._grad_views = [view.data for view in self.views(flat_N)]
        self._versions = [0] * len(self._grad_views)
        self._with_views = list(zip(self.params, self._grad_views, strict=True))

    # These run for each unit and micro step, some of them several times: as little Python a parameter as can be. At
    # stage 3 the parameters may be released by then, and torch would ask their class about each `grad`.

    def attach_grads(self) -> None:
        """Lets autograd accumulate into the views in place, until `detach_grads`."""
        with without_overrides():
            for param, view in self._with_views:
                param.grad = view

    def detach_grads(self) -> None:
        """Takes the views off, so that `.grad` is None. Where a script had set it to None, autograd made a new one."""
        with without_overrides():
            for param, view in self._with_views:
                grad = param.grad
                if grad is not view and grad is not None:
                    view.copy_(grad)
                param.grad = None
        self.look_for_grads()

    def begin_to_look(self) -> None:
        """What was written to the views so far is no gradient; what is written from here on is one."""
        if self.without_grad:
            self._versions = [view._version for view in self._grad_views]

    def look_for_grads(self) -> None:
        """Takes from `without_grad` what has got a gradient, be it zero: autograd adds them to the views in place."""
        if self.without_grad:
            views, before = self._grad_views, self._versions
            self.without_grad = [n for n in self.without_grad if views[n]._version == before[n]]

    def drop_grads(self) -> None:
        """Sets `.grad` to None."""
        with without_overrides():
            for param in self.params:
                param.grad = None

    @property
    def has_grads(self) -> bool:
        """Whether a parameter has a gradient; while none are attached, one that came from where nobody expects it."""
        with without_overrides():
            for param in self.params:
                if param.grad is not None:
                    return True
        return False

    def scale_grads(self, factor: float) -> None:
        """Multiplies the gradients that there are."""
        for param in self.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def names_with_grads(self) -> list[str]:
        """Returns the names of parameters that have a gradient."""
        pairs = zip(self.params, self.layout.extents, strict=True)
        return [extent.name for param, extent in pairs if param.grad is not None]

    def attach_and_add_grads(self) -> None:
        """Attaches the views, and adds to them the gradients that are there already."""
        found = [param.grad for param in self.params]
        self.attach_grads()
        for view, grad in zip(self._grad_views, found, strict=True):
            if grad is not None:
                view.add_(grad)


def group_by(spec: UnitSpec, group_of: Mapping[int, int]) -> UnitSpec:
    """Orders a unit's parameters by optimizer group, so that each group is one run of the flat buffer."""
    ordered: Sequence[tuple[str, nn.Parameter]] = sorted(spec.params, key=lambda item: group_of[id(item[1])])
    return replace(spec, params=tuple(ordered))


def zeros_for(units: Iterable[ParamUnit], collectives: Collectives) -> Callable[..., Tensor]:
    """Returns what makes zeroed memory for units: that which the ranks move fastest, where they can make it together.

    They do so by calls of one size on all of them. Where they have parts of parameters, which may be of unlike sizes,
    it is each rank's own memory.

    Args:
        units: the units.
        collectives: ranks that have the same units.
    """
    return torch.zeros if any(unit.placement.cut_over for unit in units) else collectives.zeros
