"""Module hooks that tell the store and the reducer when a unit begins and ends: per unit, never per parameter.

[Note: when a unit's gradients are complete]
Autograd runs later-made nodes first, and gradient accumulation before anything else that is ready. So when the gradient
of a unit's *input* is known, every node of the unit's forward has run and every gradient of its parameters has been
accumulated. A hook on the inputs is therefore the end of the unit's backward. A unit none of whose inputs needs a
gradient (an embedding) has no such moment; there, hooks on its few parameters count.
Source: torch FSDP2's post-backward uses the same order of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from .reducer import GradReducer
from .store import ParamStore
from .unit import ParamUnit


class UnitHooks:
    """Drives a store and a reducer from the forwards and backwards of the units' modules.

    Args:
        units: all units.
        store: asked for parameters.
        reducer: told about gradients.
    """

    def __init__(self, units: Sequence[ParamUnit], store: ParamStore, reducer: GradReducer) -> None:
        self._units = list(units)
        self._store = store
        self._reducer = reducer
        self._forward_order: list[ParamUnit] = []
        self._drivers = [
            _UnitDriver(unit, store, reducer, self._forward_order) for unit in units if unit.module is not None
        ]
        self._driver_of = {driver.unit.index: driver for driver in self._drivers}
        self._rest = [unit for unit in units if unit.module is None]
        self._rest_held = False

    def before_forward(self) -> None:
        """The root's forward begins: the rest unit is needed from here on."""
        if not self._rest_held:
            for unit in self._rest:
                self._store.acquire(unit)
            self._rest_held = True

    def before_backward(self) -> None:
        """The root's backward begins. Enters a broadcast the first time, to agree on the order of reductions."""
        used = [unit for unit in self._forward_order if self._driver_of[unit.index].used]
        self._reducer.begin([*self._rest, *used])
        for unit in self._rest:
            self._reducer.open(unit)

    def after_backward(self) -> None:
        """The root's backward has ended: nothing is in use any more, and all gradients are reduced."""
        for driver in self._drivers:
            driver.finish()
        self._reducer.finish()
        self.release_rest()

    def release_rest(self) -> None:
        """Ends the rest unit's use, after a backward or after a forward that needs none."""
        if self._rest_held:
            for unit in self._rest:
                self._store.release(unit)
            self._rest_held = False

    def unused_units(self) -> list[ParamUnit]:
        """Returns the units whose module has never been called."""
        return [driver.unit for driver in self._drivers if driver.unit not in self._forward_order]

    def remove(self) -> None:
        """Takes all hooks off the model."""
        for driver in self._drivers:
            driver.remove()


class _UnitDriver:
    """The hooks of one unit with a module."""

    def __init__(
        self, unit: ParamUnit, store: ParamStore, reducer: GradReducer, forward_order: list[ParamUnit]
    ) -> None:
        assert unit.module is not None, "the rest unit has no module to hook"
        self.unit = unit
        self.used = False  # by a forward since the last backward
        self._forward_order = forward_order  # of first uses, shared by all units
        self._store = store
        self._reducer = reducer
        self._held = False  # by the backward
        self._calls_open = 0  # forwards whose backward has not ended
        self._grads_seen = 0
        self._counts_params = False
        module: nn.Module = unit.module
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]

    def finish(self) -> None:
        """The root's backward has ended: forgets calls whose backward did not reach this unit."""
        self._end_backward()
        self._calls_open = 0
        self._grads_seen = 0
        self.used = False

    def remove(self) -> None:
        """Takes the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._store.acquire(self.unit)
        if self.unit not in self._forward_order:
            self._forward_order.append(self.unit)
        if self._held or not torch.is_grad_enabled():
            return  # a recomputation inside this unit's backward, or a forward without one
        # Before the forward, for it may change its input in place, which gives the tensor another autograd node.
        inputs = [t for t in (*_tensors(args), *_tensors(kwargs)) if t.requires_grad]
        if inputs:
            self._calls_open += 1
            register_multi_grad_hook(inputs, self._one_call_done)
        elif not self._counts_params:
            self._counts_params = True
            for param in self.unit.params:
                self._handles.append(param.register_post_accumulate_grad_hook(self._one_param_done))

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._store.release(self.unit)
        if self._held or not torch.is_grad_enabled():
            return
        # Hooks of the node, not of the tensor: they run after the tensor's own hooks, one of which ends the backward
        # of the unit behind this one and so frees a slot to prefetch into.
        nodes = {t.grad_fn for t in _tensors(output) if t.grad_fn is not None}
        self.used = self.used or bool(nodes)
        for node in nodes:
            node.register_prehook(self._begin_backward)

    def _begin_backward(self, grads: Any) -> None:
        if not self._held:
            self._store.acquire(self.unit)
            self._held = True
            self._reducer.open(self.unit)

    def _one_call_done(self, grads: Sequence[Tensor | None]) -> None:
        self._calls_open -= 1
        if self._calls_open == 0 and not self._counts_params:
            self._end_backward()

    def _one_param_done(self, param: Tensor) -> None:
        self._grads_seen += 1
        if self._grads_seen == len(self.unit.params):
            self._end_backward()

    def _end_backward(self) -> None:
        if self._held:
            self._held = False
            self._store.release(self.unit)
            self._reducer.complete(self.unit)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists, dicts and dataclass-like mappings of a module's arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
