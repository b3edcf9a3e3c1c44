"""A model is built while its parameters are taken away as soon as a module is done: no rank ever holds it whole.

Where a rank is in the job, and `zero.Init` that scripts use, stand in `engine/compose/construct.py`.

[Note: construction by slices]
Modules are built as always, with real values and the same random numbers. A module is done when it is registered as a
part of another one: then its parameters are cut. torch offers global hooks for that, so nothing of torch is replaced.
Parameters that are touched later (a `post_init` that walks over all modules) are lent: gathered when a torch function
gets them as arguments, and cut again, with rank 0's values, when others are touched. So at most the parameters of one
module and those of one call are whole at any moment, and every value is the one that an ordinary construction gives.
A tensor that `param.data` returned must not be written to after another parameter was touched.

`dsrun.initialize` and whoever else takes a model over inside such a context stands outside of it for as long: what it
makes is its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from ...compat import function_modes
from ..access.state_dicts import watch_state_dict
from ..params.absent_values import OF_NO_VALUES
from ..partition_parameters import home_of
from .unbuilt import UnbuiltOwner, UnbuiltParameters


class WholeDuringCalls:
    """A context in which parameters that `nursery` keeps are whole while a torch function uses them.

    Args:
        nursery: nursery that keeps the slices; every rank must use the same parameters in the same order.

    Attributes:
        is_paused: nothing is lent or cut.
    """

    def __init__(self, nursery: UnbuiltParameters) -> None:
        self._nursery = nursery
        self._lent: list[UnbuiltOwner] = []
        self._mode = _Touches(self)
        self.is_paused = False

    def __enter__(self) -> WholeDuringCalls:
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        if error is None:  # else other ranks need not be here
            self.take_back()

    def take_back(self) -> None:
        """Cuts the parameters that are lent, with rank 0's values."""
        if self._lent:
            self._nursery.close(self._lent, source=0, failed=False)
            self._lent = []

    def touch(self, tensors: Iterable[Tensor]) -> None:
        """A torch function is about to read or write these."""
        if self.is_paused:
            return
        homes = {id(tensor): home_of(tensor) for tensor in tensors}
        wanted = [home for home in homes.values() if isinstance(home, UnbuiltOwner) and home.keeper is self._nursery]
        if any(not home.is_open for home in wanted):
            self.take_back()
            self._lent = [home for home in wanted if not home.is_open]
            self._nursery.open(self._lent, writes=True)


class ConstructionBySlices:
    """A context in which parameters of modules that are built go to `nursery`, see [Note: construction by slices].

    Args:
        nursery: nursery that keeps the slices; every rank must build the same modules.
    """

    def __init__(self, nursery: UnbuiltParameters) -> None:
        self._nursery = nursery
        self._lending = WholeDuringCalls(nursery)
        self._pending: dict[int, tuple[str, nn.Parameter]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for handle in (
            register_module_parameter_registration_hook(self._parameter_registered),
            register_module_module_registration_hook(self._module_registered),
        ):
            self._stack.callback(handle.remove)
        self._stack.enter_context(self._lending)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is None:  # else other ranks need not be here
            self._nursery.take(self._pending.values())
        self._pending.clear()

    def _parameter_registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not self._lending.is_paused and home_of(param) is None and not param.is_meta:
            self._pending.setdefault(id(param), (f"{type(module).__name__}.{name}", param))
            watch_state_dict(module)

    def _module_registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or self._lending.is_paused:
            return
        self._lending.take_back()
        done = [self._pending.pop(id(param), None) for param in child.parameters()]
        self._nursery.take([item for item in done if item is not None])


@contextmanager
def outside_of_constructions() -> Generator[None]:
    """Yields where every context of this thread that builds by slices is left for a while; every rank must enter.

    What is built inside belongs to nobody, and parameters that somebody takes over inside are that one's from then on.
    """
    lendings = [mode.lending for mode in function_modes() if isinstance(mode, _Touches)]
    paused = [lending for lending in lendings if not lending.is_paused]
    for lending in paused:
        lending.take_back()
        lending.is_paused = True
    try:
        yield
    finally:
        for lending in paused:
            lending.is_paused = False


class _Touches(TorchFunctionMode):
    """Tells of the tensors whose values a torch function is about to read or write."""

    def __init__(self, lending: WholeDuringCalls) -> None:
        super().__init__()
        self.lending = lending

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in OF_NO_VALUES:
            self.lending.touch(_tensors([*args, *(kwargs or {}).values()]))
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
