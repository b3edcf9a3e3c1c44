"""FLOPs of this rank's optimizer steps: a forward is counted once for each shape of its inputs, and then looked up.

[Note: shapes] What a forward multiplies follows from the shapes of its inputs. The first forward of a shape is counted
while it runs; later ones cost a look-up. A run with many shapes has a few counted, and the others are scaled from the
nearest by tokens, and attention by tokens and length.

Compiled models are not watched, for a compiler skips what it sees watched: see `closed_form.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...compat import compiler_is_imported, in_transform, is_compiled
from ...second_runs import SecondRun, collecting_second_runs
from ...stacks import is_part
from ..steps.tokens import count_tokens
from .closed_form import closed_form
from .counter import FlopCount, FlopCounter, OperationObserver

#: Shapes that are counted for each part of the model.
MOST_SHAPES = 8
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class _Size:
    """Size of a forward's inputs.

    Attributes:
        tokens: Tokens, or elements of the first tensor where there are none.
        length: Tokens of a sequence, or elements of a sample.
        are_tokens: Whether these are tokens.
    """

    tokens: int
    length: int
    are_tokens: bool


class StepFlops:
    """Adds up the FLOPs of forwards that train, and of their backwards.

    Attributes:
        is_estimated: Whether some of the FLOPs since the start come from shapes of layers, or from a nearby shape.

    Args:
        modules_of: Function that returns the modules of a part of the model, by its key.
        say: Function that tells the user what is not counted, or is estimated; each once.
        tensor_ranks: Ranks that share layers: those that are not cut run on each, and are the model's once.
        plan_of: Function that returns the plan of what is computed again, or None; shapes are counted again where it
            returns another object.
    """

    def __init__(
        self,
        modules_of: Callable[[int], Sequence[nn.Module]],
        *,
        say: Callable[[str], None],
        tensor_ranks: int = 1,
        plan_of: Callable[[], object] = lambda: None,
    ) -> None:
        self.is_estimated = False
        self._modules_of = modules_of
        self._say = say
        self._tensor_ranks = tensor_ranks
        self._plan_of = plan_of
        self._plan = plan_of()
        self._counts: dict[Hashable, FlopCount | None] = {}
        self._counted: dict[int, list[tuple[_Size, FlopCount | None]]] = {}
        self._told: set[str] = set()
        self._model = self._hardware = 0.0
        self._is_known = True

    def counting(self, key: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Returns the context of one forward that trains.

        Args:
            key: Number of the part of the model that runs.
            args: Arguments of the forward.
            kwargs: Arguments by name.
        """
        if (plan := self._plan_of()) is not self._plan:
            self._plan = plan
            self._counts.clear()
            self._counted.clear()
        shapes = key, _shapes(args), _shapes(kwargs)
        if shapes not in self._counts:
            return self._new(key, shapes, args, kwargs)
        self._add(self._counts[shapes])
        return _NOTHING

    def take_step(self) -> tuple[float, float]:
        """Returns the model's and the hardware's FLOPs since the last call; -inf where a forward is not known.

        So the sum over ranks is none of part of them, and no check for nan stops the collective that adds them up.
        """
        taken = (self._model, self._hardware) if self._is_known else (-math.inf, -math.inf)
        self._model = self._hardware = 0.0
        self._is_known = True
        return taken

    def _add(self, count: FlopCount | None) -> None:
        if count is None:
            self._is_known = False
            return
        total = count.total
        self._model += total.model
        self._hardware += total.hardware

    def _new(
        self, key: int, shapes: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Any]:
        """Returns the context of the first forward of a shape."""
        if in_transform() or torch.compiler.is_compiling():
            self._add(None)
            return _NOTHING
        size = _size(args, kwargs)
        counted = self._counted.setdefault(key, [])
        if len(counted) < MOST_SHAPES:
            return self._first(key, shapes, size)
        near, count = min(counted, key=lambda one: abs(one[0].tokens - size.tokens))
        made = None if count is None else _scaled(count, near, size)
        if len(self._counts) >= _MOST_KNOWN:
            self._counts.pop(next(reversed(self._counts)))  # not the first ones, which are counted
        self._counts[shapes] = made
        self._tell("FLOPs of further shapes of inputs are estimated from those of the first ones")
        self.is_estimated = True
        self._add(made)
        return _NOTHING

    @contextmanager
    def _first(self, key: int, shapes: Hashable, size: _Size) -> Generator[None]:
        modules = self._modules_of(key)
        if can_observe(modules):
            counter = FlopCounter()
            with counter, self._with_repeats(counter, modules):
                yield
            count: FlopCount | None = counter.count()
        else:
            with collecting_second_runs() as runs:
                yield
            count = self._estimate(modules, size, runs)
        if count is not None and count.not_counted:
            self._tell(f"FLOPs: not counted: {', '.join(count.not_counted)}")
        self._counts[shapes] = count
        self._counted.setdefault(key, []).append((size, count))
        self._add(count)

    @contextmanager
    def _with_repeats(self, counter: FlopCounter, modules: Sequence[nn.Module]) -> Generator[None]:
        """Has the counter know what runs on each of the ranks that share layers."""
        whole = [] if self._tensor_ranks == 1 else [part for module in modules for part in module.modules()]

        def begin(*_: Any) -> None:
            counter.repeats = self._tensor_ranks

        def end(*_: Any) -> None:
            counter.repeats = 1

        handles: list[RemovableHandle] = []
        for part in whole:
            own = list(part.parameters(recurse=False))
            if own and not any(map(is_part, own)):
                handles += [
                    part.register_forward_pre_hook(begin),
                    part.register_forward_hook(end, always_call=True),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _estimate(self, modules: Sequence[nn.Module], size: _Size, runs: Sequence[SecondRun]) -> FlopCount | None:
        self.is_estimated = True
        try:
            count = closed_form(modules, tokens=size.tokens if size.are_tokens else 0, sequence=size.length, runs=runs)
        except Exception as error:  # a model may hold anything, and is trained all the same
            self._tell(f"FLOPs are not known: {type(error).__name__}: {error}")
            return None
        self._tell(
            "FLOPs are not known: the model is compiled, and is no language model of linear layers"
            if count is None
            else "FLOPs are estimated from the shapes of layers, for the model is compiled"
        )
        return count

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._say(f"dsrun: {line}")


#: Shapes that are kept, with those that are scaled.
_MOST_KNOWN = 4096


def can_observe(modules: Sequence[nn.Module]) -> bool:
    """Whether operations of these modules can be watched without a compiler doing anything else for it.

    Args:
        modules: Modules of which none may be compiled.
    """
    if not compiler_is_imported():
        return True
    return OperationObserver.is_ignored_by_compilers and not any(
        is_compiled(part) or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for module in modules
        for part in module.modules()
    )


def _scaled(count: FlopCount, near: _Size, size: _Size) -> FlopCount:
    tokens = size.tokens / max(1, near.tokens)
    length = size.length / max(1, near.length)
    return replace(
        count,
        products=count.products.scaled(tokens),
        attention=count.attention.scaled(tokens * length),
        is_estimated=True,
    )


def _shapes(value: Any) -> Hashable:
    """Returns the shapes of tensors in arguments; what else they hold does not change what is multiplied."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, Mapping):
        return tuple((name, _shapes(item)) for name, item in value.items())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return tuple(_shapes(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return None


def _size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Size:
    tensor = _first_tensor((*args, *kwargs.values()))
    if tensor is None or not tensor.dim():
        return _Size(0, 0, are_tokens=False)
    if tokens := count_tokens(args, kwargs):
        return _Size(tokens, tensor.shape[1], are_tokens=True)
    if tensor.dim() == 3 and tensor.is_floating_point():  # [samples, tokens, width], of another pipeline stage
        return _Size(tensor.shape[0] * tensor.shape[1], tensor.shape[1], are_tokens=True)
    return _Size(tensor.numel(), tensor.numel() // max(1, tensor.shape[0]), are_tokens=False)


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    parts: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
