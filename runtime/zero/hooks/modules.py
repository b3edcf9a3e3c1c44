"""Module hooks that tell the store and the reducer when a unit begins and ends: per unit, never per parameter.

When a call's backward ends is decided in `unit_calls.py`; what a unit is, in `zero/units/find.py`; how reads of
parameters outside of their unit's forward are seen, in `outside.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dsrun.errors import ModelError

from ...compat import in_transform, out_of_transforms, profiler_runs
from ...late_compiler import UncompiledFunction
from ...own_hooks import OwnHook
from ...trace_labels import OpenLabel
from ..grads.reducer import GradReducer
from ..params.store import ParamStore
from ..units.unit import ParamUnit
from .outside import ReadsOutside
from .unit_calls import CallTracker, ScriptBackward, UnitCalls

_SEQUENCES = (tuple, list)


class UnitHooks:
    """Drives a store and a reducer from the forwards and backwards of the units' modules.

    Args:
        units: all units.
        store: parameter store, which is asked for parameters.
        reducer: gradient reducer, which is told about gradients.
    """

    def __init__(self, units: Sequence[ParamUnit], store: ParamStore, reducer: GradReducer) -> None:
        self._store = store
        self._reducer = reducer
        trained = [param for unit in units if unit.trains for param in unit.params]
        self._tracker = CallTracker(store, reducer, trained=lambda: trained)
        self._drivers = [_UnitDriver(unit, self._tracker) for unit in units if unit.module is not None]
        self._handles: list[RemovableHandle] = []
        rest = [UnitCalls(unit) for unit in units if unit.module is None]
        self._places = {
            id(param): (calls, position)
            for calls in (*(driver.calls for driver in self._drivers), *rest)
            for position, param in enumerate(calls.unit.gathered_params)
        }
        self._rest = [unit for unit in units if unit.module is None]
        self._rest_held = False
        self._reach_root: Callable[[Any], None] = OwnHook(self._tracker.reach_root)
        self._watches: list[RemovableHandle] = []
        self._watched: set[int] = set()  # units whose first backward has begun
        self._steps = 0
        self._inputs: list[set[Node]] = []  # of the root's forwards under way: the nodes that made them

    def follow(self, root: nn.Module) -> None:
        """Watches the forwards of the root too, whoever calls it; the engine's own go through `before_forward`."""
        self._handles += [
            root.register_forward_pre_hook(OwnHook(self._enter_root), with_kwargs=True),
            root.register_forward_hook(OwnHook(self._leave_root), always_call=True),
        ]

    def follow_script(self, script: ScriptBackward) -> None:
        """Has backwards of the script's own asked for; see [Note: backwards of the script] in `unit_calls.py`."""
        self._tracker.script = script

    def find_failed(self) -> None:
        """Gives up a backward of the script's own that has raised, if one has; not inside a backward."""
        self._tracker.find_failed()

    def before_forward(self) -> None:
        """The root's forward begins: the rest unit is needed from here on."""
        self._tracker.find_failed()
        self._hold_rest()

    def before_backward(
        self,
        *,
        retain_graph: bool = False,
        reduce: bool = True,
        scale: float = 1.0,
        strays: float | None = 1.0,
        has_begun: bool = False,
        units: Collection[int] | None = None,
        opens_all: bool = False,
    ) -> None:
        """The root's backward begins. Enters a broadcast the first time, to agree on the order of reductions.

        Args:
            retain_graph: whether there may be another backward through the same calls.
            reduce: False: this micro step's gradients may be reduced with a later one's.
            scale: factor that gradients are multiplied by when they are added; see `GradReducer.begin`.
            strays: factor for gradients that exist already; None: they are refused; see `GradReducer.begin`.
            has_begun: the backward is under way already, so it may have come to parameters of the rest unit.
            units: numbers of the units that it may come to, where it is that of a part of the model; None: all.
            opens_all: whether gradients come outside of the backwards of calls: all of these units are made ready.
        """
        self._hold_rest()
        drivers = [d for d in self._drivers if units is None or d.calls.unit.index in units]
        if not self._watched:
            # Each step checks this before its update. The first one does so here too: where ranks went other ways,
            # their gathers and reductions would wait for each other for ever.
            self._store.check_same_order()
        rest = [unit for unit in self._rest if units is None or unit.index in units]
        unwatched = [driver for driver in drivers if driver.calls.unit.index not in self._watched]
        if unwatched:
            self._watch(unwatched)
        self._watched.update(unit.index for unit in rest)
        used = [*rest, *(d.calls.unit for d in drivers if opens_all or self._watches or d.calls.may_get_grads)]
        self._reducer.begin(
            order=self._forward_order, used=used, units=units, reduce=reduce, scale=scale, strays=strays
        )
        for unit in rest:
            self._reducer.open(unit, is_there=has_begun)
        for driver in drivers:
            if opens_all or driver.calls.anywhere:
                self._reducer.open(driver.calls.unit)
        self._tracker.enter_backward(retain_graph=retain_graph)

    def after_backward(self) -> None:
        """The root's backward has ended: nothing is in use any more, and all gradients are reduced."""
        self._tracker.leave_backward()
        self._reducer.finish()
        self.release_rest()
        if self._watches:
            self._unwatch()

    def abandon_backward(self) -> None:
        """The root's backward raised: what it left half done is forgotten, with its gradients."""
        self._tracker.abandon_backward()
        self._reducer.abandon()
        self.release_rest()
        if self._watches:
            self._unwatch()
            self._watched.clear()

    def before_step(self) -> None:
        """The parameters get new values: no backward goes through an earlier call any more."""
        self._steps += 1
        self.release_rest()
        for driver in self._drivers:
            driver.calls.forget_all()

    def release_rest(self) -> None:
        """Ends the rest unit's use, after a backward or after a forward that needs none."""
        if self._rest_held:
            for unit in self._rest:
                self._store.release(unit)
            self._rest_held = False

    def running_unit(self) -> ParamUnit | None:
        """Returns a unit whose module is inside its forward now."""
        return next((driver.calls.unit for driver in self._drivers if driver.is_open), None)

    def read_released(self, param: nn.Parameter) -> Tensor:
        """Returns the values of a parameter whose unit is not in use, with a gradient; every rank must call."""
        calls, position = self._places[id(param)]
        return self._tracker.read_released(calls, position)

    def unused_units(self) -> list[ParamUnit]:
        """Returns the units whose module has never been called."""
        return [driver.calls.unit for driver in self._drivers if driver.first_use is None]

    def remove(self) -> None:
        """Takes all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        for driver in self._drivers:
            driver.remove()

    def _forward_order(self) -> list[ParamUnit]:
        """Returns the units in the order of their first forward."""
        order = [driver.calls.unit for driver in sorted(self._drivers, key=_first_use) if driver.first_use is not None]
        return [*self._rest, *order]

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._tracker.enter_root()
        self._hold_rest()
        inputs: set[Node] = set()
        if self._rest and torch.is_grad_enabled() and not in_transform():
            _add_nodes(args, inputs)
            _add_nodes(kwargs, inputs)
        self._inputs.append(inputs)

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self._tracker.leave_root()
        inputs = self._inputs.pop() if self._inputs else set[Node]()
        if not torch.is_grad_enabled():
            if not self._tracker.is_active:
                self.release_rest()
        elif self._rest and not in_transform():
            nodes: set[Node] = set()
            _add_nodes(output, nodes)
            for node in nodes - inputs:  # an input that is handed through belongs to who made it
                node.register_prehook(partial(self._reach_from, self._steps))

    def _reach_from(self, step: int, grads: Any) -> None:
        """A backward comes to an output of the root's forward; units look for themselves, the rest unit has no calls.

        Raises:
            ModelError: the weights that the forward has read are gone.
        """
        if step != self._steps:
            raise ModelError(
                "model: the backward goes through a forward from before the last engine.step() or load, "
                "which has changed its weights",
                hint="call backward before engine.step(); detach() what is kept from step to step",
            )
        self._reach_root(grads)

    def _hold_rest(self) -> None:
        if not self._rest_held:
            with out_of_transforms() if in_transform() else nullcontext():
                for unit in self._rest:
                    self._store.acquire(unit)
            self._rest_held = True

    def _watch(self, drivers: Sequence[_UnitDriver]) -> None:
        """Looks at every single gradient of the first backward, for weights used outside of their module's forward."""
        for driver in drivers:
            unit = driver.calls.unit
            self._watched.add(unit.index)
            if not unit.trains:
                continue
            driver.calls.unseen = len(unit.params)
            for extent, param in zip(unit.layout.extents, unit.params, strict=True):
                if not param.requires_grad:
                    continue  # frozen since the engine was made, which the step refuses by name
                handle = param.register_hook(partial(self._tracker.check_place, driver.calls, extent.name))
                self._watches.append(handle)

    def _unwatch(self) -> None:
        for handle in self._watches:
            handle.remove()
        self._watches.clear()
        for driver in self._drivers:
            driver.calls.unseen = 0


def _first_use(driver: _UnitDriver) -> int:
    return -1 if driver.first_use is None else driver.first_use


class _UnitDriver:
    """The hooks of one unit with a module.

    Attributes:
        calls: forward calls of this unit, as the tracker follows them.
        first_use: the tracker's clock at the first forward; None before.
    """

    def __init__(self, unit: ParamUnit, tracker: CallTracker) -> None:
        assert unit.module is not None, "the rest unit has no module to hook"
        self.calls = UnitCalls(unit)
        self.first_use: int | None = None
        self._tracker = tracker
        self._input_nodes: set[Node] = set()
        self._open = 0  # forwards that have begun; hooks after a forward also run where the one before it raised
        self._reads = ReadsOutside(unit, UncompiledFunction(self._read))
        self._label: OpenLabel | None = None  # of the forward that began last, while a profiler runs
        self._handles: list[RemovableHandle] = []
        for module in (unit.module, *unit.twins):
            self._handles += [
                module.register_forward_pre_hook(OwnHook(self._before_forward), with_kwargs=True),
                module.register_forward_hook(OwnHook(self._after_forward), with_kwargs=True, always_call=True),
            ]

    @property
    def is_open(self) -> bool:
        """Whether the module's forward is under way."""
        return self._open > 0

    def remove(self) -> None:
        """Takes the hooks off the module."""
        for handle in self._handles:
            handle.remove()
        self._reads.let_through()

    def _read(self, position: int) -> Tensor:
        if in_transform():
            with out_of_transforms():
                return self._tracker.read(self.calls, position, transformed=True)
        return self._tracker.read(self.calls, position)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_transform():
            self._enter_transformed()
            return
        self._tracker.enter_forward(self.calls)
        self._open += 1
        self._reads.let_through()
        if self.first_use is None:
            self.first_use = self._tracker.tick()
        # Now, for the forward may change an input in place, which gives the tensor another node.
        self._input_nodes.clear()
        _add_nodes(args, self._input_nodes)
        if kwargs:
            _add_nodes(kwargs, self._input_nodes)
        if profiler_runs() and self._label is None:
            self._label = OpenLabel(f"forward {self.calls.unit.name}")

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._open:
            return
        self._open -= 1
        if self._label is not None:
            self._label.end()
            self._label = None
        if not self._open:
            self._reads.watch()
        if in_transform():
            with out_of_transforms():
                self._tracker.leave_forward(self.calls, has_graph=False)
            return
        # An input handed through belongs to the call that made it.
        nodes: set[Node] = set()
        _add_nodes(output, nodes)
        nodes -= self._input_nodes
        self._input_nodes.clear()
        begin = self._tracker.leave_forward(self.calls, has_graph=bool(nodes))
        if begin is not None:
            for node in nodes:
                node.register_prehook(begin)
        elif torch.is_grad_enabled() and not nodes and _is_opaque(output):
            raise ModelError(
                f"model: the forward of `{self.calls.unit.name}` returns a {type(output).__name__}, in which no tensor "
                "was found, so its backward cannot be followed",
                hint="return tensors, or tuples, lists, dicts or dataclasses of tensors",
            )

    def _enter_transformed(self) -> None:
        """The forward begins inside a transform of torch.func: what it reads are copies, see [Note: transforms]."""
        with out_of_transforms():
            self._tracker.enter_forward(self.calls)
        self._open += 1
        if self.first_use is None:
            self.first_use = self._tracker.tick()


def _add_nodes(value: Any, nodes: set[Node]) -> None:
    """Adds the autograd nodes that made the tensors in nested tuples, lists, mappings and dataclasses.

    Those that made the bases of views too: a change in place behind the module takes a view's own node out of the
    graph.
    """
    if isinstance(value, Tensor):
        node = value.grad_fn
        if node is None:
            return
        nodes.add(node)
        if value._is_view():
            base = value._base  # pyright: ignore[reportPrivateUsage]
            if base is not None and base.grad_fn is not None:
                nodes.add(base.grad_fn)
    elif isinstance(value, _SEQUENCES):
        for item in value:
            _add_nodes(item, nodes)
    elif isinstance(value, Mapping):
        for item in value.values():
            _add_nodes(item, nodes)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _add_nodes(getattr(value, field.name, None), nodes)


def _is_opaque(output: Any) -> bool:
    """Whether `output` is an object that `_tensors` does not look into."""
    looked_into = isinstance(output, (Tensor, Mapping, *_SEQUENCES)) or dataclasses.is_dataclass(output)
    return not looked_into and not isinstance(output, str | bool | int | float | None)
