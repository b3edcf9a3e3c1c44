"""Parameters that a forward reads outside of their unit's forward: where stage 3 has not gathered them, and where no
call of the unit says when their gradients come.

Finds such reads and says what they get instead; when units are gathered is decided elsewhere.

[Note: reads outside]
`F.linear(x, self.embed.weight)` in a model's own forward reads the parameter of a unit that is not in use: its slot
may hold another unit. Such a read gets a *copy*: the unit is gathered into its slot, or elsewhere if the slot is in
use, the one parameter is copied, and the copy lives as long as autograd needs it. Its gradient flows to the parameter.
So nothing has to be declared (`register_external_parameter`), and the cost is a gather and a copy a read, on top of
what the unit's own calls cost. Every rank must read the same. Where parameters are always there, a read gets an alias.

A unit's gradient is reduced when the backwards of its calls are over, unless a read of it is still held by autograd.

A read is seen because `module.weight` looks into `module._parameters`, which is a dict of ours while the unit's forward
does not run, and the module's own one while it does: what blocks themselves do costs nothing, and `torch.compile` sees
plain dicts. `model.parameters()` does not look there: its values stay those of the slots, as for every read outside of
a forward or backward of the model.

[Note: transforms]
`torch.func` (`grad`, `vmap`, `jvp`, and what is made of them) differentiates a unit's forward in levels of its own,
each with a graph that other hooks do not see, and whose backward may run at once, or again in that of the model. So a
unit that is called inside a transform stays watched: all it reads are copies, as above, that live as long as some
graph needs them. What runs on behalf of a read or a call (gathers) is seen by no transform. A transform inside a
unit's own forward needs nothing of this.

`torch.func.functional_call` puts tensors into `_parameters`, and puts back what it read there: a read that is put back
is the parameter again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ...compat import in_transform, pass_for_parameter, untransformed
from ..partition_parameters import home_of, is_zero_param, set_memory
from ..units.released import OutsideTensor, outside
from ..units.unit import ParamUnit

_SOURCE = "_dsrun_source"
_DATA: Any = Tensor.data


class ReadsOutside:
    """Watches the reads of one unit's parameters while its forward does not run, see [Note: reads outside].

    Args:
        unit: a unit with a module.
        read: function that gets the parameter's position in the unit, and returns the tensor that a read gets.
    """

    def __init__(self, unit: ParamUnit, read: Callable[[int], Tensor]) -> None:
        assert unit.module is not None, "the rest unit is in use during the whole forward"
        position_of = {id(param): position for position, param in enumerate(unit.gathered_params)}
        self._dicts: list[tuple[dict[str, Any], dict[str, Any], _Watched]] = []
        for module in chain.from_iterable(whole.modules() for whole in (unit.module, *unit.twins)):
            plain: dict[str, Any] = module.__dict__["_parameters"]
            positions = {name: (position_of[id(p)], p) for name, p in plain.items() if id(p) in position_of}
            if positions:
                self._dicts.append((module.__dict__, plain, _Watched(plain, positions, read, unit.wait_update)))
        self.watch()

    def watch(self) -> None:
        """The unit's forward does not run: reads get what `read` says."""
        for attributes, _, watched in self._dicts:
            attributes["_parameters"] = watched

    def let_through(self) -> None:
        """The unit's forward runs: reads get the parameters themselves."""
        for attributes, plain, _ in self._dicts:
            attributes["_parameters"] = plain


class _Watched(dict[str, Any]):
    """A module's `_parameters`; whoever goes through all of them gets the parameters themselves.

    Args:
        plain: the module's own dict.
        positions: position in the unit of each of the module's parameters, with the parameter itself, by name.
        read: function that returns the tensor that a read gets; see `ReadsOutside`.
        arrive: callback, called before anybody who goes through all parameters gets any: an update may still bring new
            values.
    """

    def __init__(
        self,
        plain: dict[str, Any],
        positions: Mapping[str, tuple[int, nn.Parameter]],
        read: Callable[[int], Tensor],
        arrive: Callable[[], None],
    ) -> None:
        super().__init__(plain)
        self._arrive = arrive
        self._plain = plain
        self._positions = positions
        self._read = read

    def __getitem__(self, name: str) -> Any:
        present = super().__getitem__(name)
        place = self._positions.get(name)
        return present if place is None or present is not place[1] else self._read(place[0])

    def items(self) -> Any:
        """See the class: `module.parameters()` comes this way."""
        self._arrive()
        return super().items()

    def values(self) -> Any:
        """See the class."""
        self._arrive()
        return super().values()

    def __setitem__(self, name: str, value: Any) -> None:
        place = self._positions.get(name)
        if place is not None and getattr(value, _SOURCE, None) is place[1]:
            value = place[1]  # a read of it is put back
        elif place is not None and in_transform():
            _check_differentiated(name, value)
        super().__setitem__(name, value)
        self._plain[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._plain[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a model, pickled or not, have dicts of their own again."""
        self._arrive()
        return dict, (dict(self),)


def _check_differentiated(name: str, value: Any) -> None:
    """Refuses that a transform differentiates by the memory in which sharded parameters take turns.

    Raises:
        ModelError: naming the parameter.
    """
    inside = untransformed(value) if isinstance(value, Tensor) else None
    if inside is not None and is_zero_param(inside):
        home = home_of(inside)
        raise ModelError(
            f"model: torch.func gets `{name if home is None else home.name}` as named_parameters() has it, which at "
            "stage 3 is memory that other parameters take over",
            hint="read it as an attribute: {name: block.get_parameter(name) for name, _ in block.named_parameters()}",
        )


class OutsideRead:
    """One read; autograd holds it for as long as a backward may come to what was read.

    Args:
        fetch: function that makes the values.
        before_grad: callback, called before a gradient reaches the parameter.
    """

    __slots__ = ("__weakref__", "before_grad", "fetch")

    def __init__(self, fetch: Callable[[], Tensor], before_grad: Callable[[], None]) -> None:
        self.fetch = fetch
        self.before_grad = before_grad


def source_of(tensor: Tensor) -> Tensor:
    """Returns the parameter of which a read got `tensor`; any other tensor itself."""
    found: Tensor = getattr(tensor, _SOURCE, tensor)
    return found


def handed_out(param: nn.Parameter, reading: OutsideRead) -> Tensor:
    """Returns what a read of `param` gets; its gradient flows to `param`."""
    made = _HandedOut.apply(param, reading)
    assert isinstance(made, Tensor), "an autograd function of one output"
    setattr(made, _SOURCE, param)
    pass_for_parameter(made)
    return made


def aliased(made: Tensor) -> Tensor:
    """Returns what was handed out of a parameter that is always there, so that its `data` is the parameter's."""
    bare: Any = made
    bare.__class__ = ParameterAlias
    return made


def followed(made: Tensor, param: nn.Parameter) -> Tensor:
    """Returns what was handed out so that a write to it reaches the parameter; see `zero/units/released.py`."""
    found: Any = outside(made, param)
    if isinstance(found, OutsideTensor):
        found.__class__ = ParameterCopy
    setattr(found, _SOURCE, param)
    pass_for_parameter(found)
    return found


class ParameterAlias(Tensor):
    """What a read gets where parameters are always there. Kernels and torch treat it as any other tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parameter's, for torch does not count what is written there as a change of the parameter."""
        return getattr(self, _SOURCE).data

    @data.setter
    def data(self, value: Tensor) -> None:
        _give_memory(self, value)


class ParameterCopy(OutsideTensor):
    """What a read gets where the unit is not in use."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The copy without its history, which follows and writes as the copy does."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _give_memory(self, value)


def _give_memory(read: Tensor, value: Tensor) -> None:
    getattr(read, _SOURCE).data = value
    set_memory(read, value)


class _HandedOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, reading: OutsideRead) -> Tensor:
        ctx.reading = reading
        return reading.fetch()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.reading.before_grad()
        return grad, None
