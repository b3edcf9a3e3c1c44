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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .unit import ParamUnit


class ReadsOutside:
    """Watches the reads of one unit's parameters while its forward does not run, see [Note: reads outside].

    Args:
        unit: a unit with a module.
        read: asked what a read gets, with the parameter's position in the unit.
    """

    def __init__(self, unit: ParamUnit, read: Callable[[int], Tensor]) -> None:
        assert unit.module is not None, "the rest unit is in use during the whole forward"
        position_of = {id(param): position for position, param in enumerate(unit.gathered_params)}
        self._dicts: list[tuple[dict[str, Any], dict[str, Any], _Watched]] = []
        for module in unit.module.modules():
            plain: dict[str, Any] = module.__dict__["_parameters"]
            positions = {name: position_of[id(p)] for name, p in plain.items() if id(p) in position_of}
            if positions:
                self._dicts.append((module.__dict__, plain, _Watched(plain, positions, read, unit.arrive)))
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
        positions: of its parameters in the unit.
        read: see `ReadsOutside`.
        arrive: called before whoever goes through all of them gets any: an update may still bring new values.
    """

    def __init__(
        self,
        plain: dict[str, Any],
        positions: Mapping[str, int],
        read: Callable[[int], Tensor],
        arrive: Callable[[], None],
    ) -> None:
        super().__init__(plain)
        self._arrive = arrive
        self._plain = plain
        self._positions = positions
        self._read = read

    def __getitem__(self, name: str) -> Any:
        position = self._positions.get(name)
        return super().__getitem__(name) if position is None else self._read(position)

    def items(self) -> Any:
        """See the class: `module.parameters()` comes this way."""
        self._arrive()
        return super().items()

    def values(self) -> Any:
        """See the class."""
        self._arrive()
        return super().values()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._plain[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._plain[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a model, pickled or not, have dicts of their own again."""
        self._arrive()
        return dict, (dict(self),)


class Reading:
    """One read; autograd holds it for as long as a backward may come to what was read.

    Args:
        fetch: makes the values.
        before_grad: called before a gradient reaches the parameter.
    """

    __slots__ = ("__weakref__", "before_grad", "fetch")

    def __init__(self, fetch: Callable[[], Tensor], before_grad: Callable[[], None]) -> None:
        self.fetch = fetch
        self.before_grad = before_grad


def handed_out(param: nn.Parameter, reading: Reading) -> Tensor:
    """Returns what a read of `param` gets; its gradient flows to `param`."""
    made = _HandedOut.apply(param, reading)
    assert isinstance(made, Tensor), "an autograd function of one output"
    return made


class _HandedOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, reading: Reading) -> Tensor:
        ctx.reading = reading
        return reading.fetch()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.reading.before_grad()
        return grad, None
