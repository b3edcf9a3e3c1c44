"""How one chunk of a plain model runs: the model's own forward, with stand-ins where other chunks have parts.

It is given the model as it is cut; where, `cut.py` decides.

[Note: one chunk's forward]
The whole forward runs with the whole micro batch. Blocks before the chunk hand on what they get; in front of the
chunk's first block the received activation takes the place of the hidden states, so that everything beside them (masks,
rotary tables, positions) is made here from the batch. The block behind the chunk ends the forward by an exception of
its own, and what it would have been given is the chunk's result. So nothing outside runs twice on what counts, and no
code behind the boundary runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ...hidden_states import hidden_of, value_at, with_value
from ...twins import twin_of
from .stand_ins import Form, Shape, acting, form_from, form_to, hollow, leaves_of, other_tensors


@dataclass(frozen=True, slots=True)
class HollowSlot:
    """A place of a parameter outside of the stack.

    Attributes:
        name: qualified name.
        owner: module that has it.
        attribute: name in that module.
        shape: look of the parameter.
        home: chunk of this rank that has it in this place; None: none has.
    """

    name: str
    owner: nn.Module
    attribute: str
    shape: Shape
    home: int | None


@dataclass(frozen=True, slots=True)
class OutsideGroup:
    """An outermost module outside of the stack all of whose parameters are one chunk's.

    Attributes:
        module: module.
        parents: modules that have it as a child, and its name there.
        home: chunk of this rank that has it; None: none has.
    """

    module: nn.Module
    parents: tuple[tuple[nn.Module, str], ...]
    home: int | None


@dataclass(frozen=True, slots=True)
class SecondUse:
    """A parameter behind the stack whose place holds another parameter, of its use before the stack.

    Attributes:
        owner: module that is to read it.
        attribute: name in that module.
        holder: module that has the parameter.
        held_as: name there.
    """

    owner: nn.Module
    attribute: str
    holder: nn.Module
    held_as: str


@dataclass(frozen=True, slots=True)
class CutStack:
    """The stack of a model that is cut.

    Attributes:
        container: module that has the blocks.
        keys: name of each block in it.
        names: qualified name of each block.
        looks: look of each block.
        bounds: first block of each chunk, and the number of blocks.
    """

    container: nn.Module
    keys: tuple[str, ...]
    names: tuple[str, ...]
    looks: tuple[nn.Module, ...]
    bounds: tuple[int, ...]


@dataclass(slots=True)
class _Progress:
    """How far a chunk's run has come."""

    next_block: int = 0
    form: Form | None = None
    hollow_names: dict[int, str] = field(default_factory=dict[int, str])
    twins: dict[int, nn.Module] = field(default_factory=dict[int, nn.Module])


class _Done(BaseException):
    """Ends a forward behind a chunk's last block; no `except Exception` of a model's code stops it."""

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__()
        self.value = value


class ChunkRunner:
    """Runs chunks of a cut model, see [Note: one chunk's forward].

    Args:
        model: model as this rank has it.
        stack: its stack.
        groups: modules outside of the stack.
        slots: all places of parameters outside of the stack.
        second_uses: parameters that are put in place behind the last block.
    """

    def __init__(
        self,
        model: nn.Module,
        stack: CutStack,
        groups: Sequence[OutsideGroup],
        slots: Sequence[HollowSlot],
        second_uses: Sequence[SecondUse],
    ) -> None:
        self._model = model
        self._stack = stack
        self._groups = groups
        self._second_uses = second_uses
        self._slots = slots
        self._twins = {id(group.module): twin_of(group.module, with_tensors=True) for group in groups}
        self._twin_parts = [
            (slot, _same_part(group.module, self._twins[id(group.module)], slot.owner), group)
            for slot in slots
            for group in groups
            if any(part is slot.owner for part in group.module.modules())
        ]
        grouped = {id(slot) for slot, _, _ in self._twin_parts}
        self._loose = [slot for slot in slots if id(slot) not in grouped]
        self._checked: set[int] = set()

    def run(self, chunk: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Any) -> Any:
        """Returns what the next chunk needs; of the last chunk, the model's output.

        Args:
            chunk: number of the chunk.
            args: positional arguments of the model's forward.
            kwargs: keyword arguments of the model's forward.
            received: result of the chunk before; None for the first one.

        Raises:
            ModelError: something beside the hidden states goes from block to block and carries gradients.
        """
        is_last = chunk == len(self._stack.bounds) - 2
        progress = _Progress()
        undo: list[Callable[[], None]] = []
        try:
            self._place_outside(chunk, received, progress, undo)
            self._place_blocks(chunk, received, progress, undo)
            output = self._model(*args, **kwargs)
        except _Done as done:
            return done.value
        finally:
            for step in reversed(undo):
                step()
        if not is_last or progress.next_block != self._stack.bounds[-1]:
            wanted = self._stack.names[progress.next_block]
            raise ModelError(
                f"model: its forward has ended without a call of `{wanted}`; pipeline stages need each block of a "
                "stack to be called once, in order",
                hint="set `pipeline.stages` to 1, or write the model as a PipelineModule",
            )
        self._check_graph(chunk, output, progress, "the model's output")
        return output

    def _place_outside(self, chunk: int, received: Any, progress: _Progress, undo: list[Callable[[], None]]) -> None:
        """Puts looks with hollow parameters in the place of modules that are not the chunk's."""
        dtype, device = self._kind_of(chunk, received)
        for slot, part, group in self._twin_parts:
            if group.home != chunk:
                param = hollow(slot.shape, value=float("nan"), dtype=dtype, device=device)
                _params(part)[slot.attribute] = param
                progress.hollow_names[id(param)] = slot.name
        for group in self._groups:
            if group.home != chunk:
                twin = self._twins[id(group.module)]
                progress.twins[id(group.module)] = twin
                for parent, name in group.parents:
                    _exchange(_children(parent), name, twin, undo)
        for slot in self._loose:
            if slot.home != chunk:
                param = hollow(slot.shape, value=float("nan"), dtype=dtype, device=device)
                _exchange(slot.owner.__dict__, slot.attribute, param, undo)
                progress.hollow_names[id(param)] = slot.name

    def _kind_of(self, chunk: int, received: Any) -> tuple[torch.dtype | None, torch.device]:
        if received is not None:
            hidden: Tensor = received["hidden"]
            return hidden.dtype, hidden.device
        block = _children(self._stack.container)[self._stack.keys[self._stack.bounds[chunk]]]
        assert block is not None, "the chunk has its blocks"
        tensors = [*block.parameters(), *block.buffers()]
        dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        return dtypes[0] if dtypes else None, tensors[0].device if tensors else torch.device("cpu")

    def _place_blocks(self, chunk: int, received: Any, progress: _Progress, undo: list[Callable[[], None]]) -> None:
        stack, children = self._stack, _children(self._stack.container)
        first, end = stack.bounds[chunk], stack.bounds[chunk + 1]
        form = None if received is None else form_from(received["form"], received["hidden"].device)
        for number, key in enumerate(stack.keys):
            if number < first:
                assert form is not None, "a chunk that is not the first one has received its form"
                acts = self._passing(number, form, progress)
            elif first < number < end - 1:
                continue
            elif number < end:
                block = children[key]
                assert block is not None, "the chunk has its blocks"
                substitute = received["hidden"] if received is not None and number == first else None
                acts = self._own(chunk, number, block, substitute, progress, undo)
            elif number == end:
                acts = self._ending(chunk, number, progress)
            else:
                acts = self._never(number)
            _exchange(children, key, acting(stack.looks[number], acts), undo)

    def _passing(self, number: int, form: Form, progress: _Progress) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._in_order(number, progress)
            return form.around(value_at(self._hidden(number, args, kwargs), args, kwargs))

        return forward

    def _own(
        self,
        chunk: int,
        number: int,
        block: nn.Module,
        substitute: Tensor | None,
        progress: _Progress,
        undo: list[Callable[[], None]],
    ) -> Callable[..., Any]:
        first, end = self._stack.bounds[chunk], self._stack.bounds[chunk + 1]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if number == end - 1 > first and progress.next_block == first + 1:
                progress.next_block = number  # those between are not watched
            self._in_order(number, progress)
            given: Mapping[str, Any] = kwargs
            if number == first and len(self._stack.bounds) > 2:
                place = self._hidden(number, args, kwargs)
                if substitute is not None:
                    self._check_others(number, place, args, kwargs)
                    args, given = with_value(place, substitute, args, kwargs)
                else:
                    self._check_graph(chunk, args, progress, f"`{self._stack.names[number]}`", keep=True)
            output = block(*args, **given)
            if number + 1 == len(self._stack.keys):
                self._enter_last(progress, undo)
            elif number + 1 == end:
                progress.form = Form.of(output)
                if progress.form is None:
                    raise ModelError(
                        f"model: `{self._stack.names[number]}` returns a {type(output).__name__}; pipeline stages are "
                        "cut behind blocks that return their hidden states, alone or in a tuple",
                        hint="set `pipeline.stages` to 1, or write the model as a PipelineModule",
                    )
            return output

        return forward

    def _ending(self, chunk: int, number: int, progress: _Progress) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._in_order(number, progress)
            place = self._hidden(number, args, kwargs)
            self._check_others(number, place, args, kwargs)
            hidden: Tensor = value_at(place, args, kwargs)
            self._check_graph(chunk, hidden, progress, f"`{self._stack.names[number]}`")
            assert progress.form is not None, "the block before has returned"
            raise _Done({"hidden": hidden, "form": form_to(progress.form)})

        return forward

    def _never(self, number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            raise self._out_of_order(number)

        return forward

    def _enter_last(self, progress: _Progress, undo: list[Callable[[], None]]) -> None:
        """Puts the parameters in place that are used behind the stack, and in the same places before it too."""
        for use in self._second_uses:
            param = getattr(use.holder, use.held_as)
            twins = [
                part
                for slot, part, group in self._twin_parts
                if slot.owner is use.owner and id(group.module) in progress.twins
            ]
            for owner in (*twins, use.owner):
                _exchange(owner.__dict__, use.attribute, param, undo)

    def _hidden(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
        place = hidden_of(args, kwargs)
        if place is None:
            raise ModelError(
                f"model: `{self._stack.names[number]}` is given no tensor of floating numbers; pipeline stages hand "
                "hidden states on between blocks",
                hint="set `pipeline.stages` to 1, or write the model as a PipelineModule",
            )
        return place

    def _in_order(self, number: int, progress: _Progress) -> None:
        if progress.next_block != number:
            raise self._out_of_order(number)
        progress.next_block += 1

    def _out_of_order(self, number: int) -> ModelError:
        return ModelError(
            f"model: its forward calls `{self._stack.names[number]}` out of order; pipeline stages need each block of "
            "a stack to be called once, in order",
            hint="set `pipeline.stages` to 1, or write the model as a PipelineModule",
        )

    def _check_others(self, number: int, place: int | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for name, value in other_tensors(place, args, kwargs):
            if value.requires_grad:
                raise ModelError(
                    f"model: {name} of `{self._stack.names[number]}`, of shape {tuple(value.shape)}, carries gradients "
                    "beside its hidden states; only hidden states go from one pipeline stage to the next",
                    hint="set `pipeline.stages` to 1, or write the model as a PipelineModule",
                )

    def _check_graph(self, chunk: int, value: Any, progress: _Progress, where: str, *, keep: bool = False) -> None:
        """Looks once whether a result comes of parameters that the chunk does not have."""
        if chunk in self._checked or not progress.hollow_names or not torch.is_grad_enabled():
            return
        for leaf in leaves_of(value):
            name = progress.hollow_names.get(id(leaf))
            if name is not None:
                raise ModelError(
                    f"model: {where} comes of `{name}`, which another pipeline stage has: it is used on both sides of "
                    "the stack, or where its place in the model does not tell",
                    hint="register it before the stack if it is used before, behind it if behind; or set "
                    "`pipeline.stages` to 1",
                )
        if not keep:
            self._checked.add(chunk)


def _same_part(module: nn.Module, twin: nn.Module, part: nn.Module) -> nn.Module:
    """Returns the part of a twin that stands for a part of its module."""
    return next(there for here, there in zip(module.modules(), twin.modules(), strict=True) if here is part)


def _children(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules  # pyright: ignore[reportPrivateUsage]


def _params(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters  # pyright: ignore[reportPrivateUsage]


_NOTHING = object()


def _exchange(places: dict[str, Any], name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    """Puts a value in a dict until it is undone."""
    before = places.get(name, _NOTHING)

    def back() -> None:
        if before is _NOTHING:
            places.pop(name, None)
        else:
            places[name] = before

    places[name] = value
    undo.append(back)
