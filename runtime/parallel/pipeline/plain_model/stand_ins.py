"""What stands in for parts of a model that another chunk has, while one chunk runs: their look, without their weights.

Runs nothing by itself and does not know chunks.

[Note: hollow parameters]
In front of a chunk's first block the model's forward runs on every rank, for masks, rotary tables and positions. What
it makes of foreign parameters there is thrown away. So their places hold one NaN that is spread over the parameter's
shape: it takes no memory, and results have the shapes that they should have. Were a result used after all, it would be
NaN, and as the place requires gradients, the graph tells its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...hidden_states import hidden_of


@dataclass(frozen=True, slots=True)
class Shape:
    """What a parameter looks like.

    Attributes:
        size: shape.
        dtype: dtype.
    """

    size: tuple[int, ...]
    dtype: torch.dtype


def hollow(shape: Shape, *, value: float, dtype: torch.dtype | None, device: torch.device) -> nn.Parameter:
    """Returns a parameter of one element, spread over the shape; see [Note: hollow parameters].

    Args:
        shape: look of the parameter that it stands for.
        value: value of all elements; 0 where the parameter holds no floating numbers.
        dtype: dtype of floating parameters; None: that of the parameter that it stands for.
        device: device of the result.
    """
    floats = shape.dtype.is_floating_point
    one = torch.full((), value if floats else 0, dtype=(dtype or shape.dtype) if floats else shape.dtype, device=device)
    return nn.Parameter(one.expand(shape.size), requires_grad=floats)


def acting(twin: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Returns a module that looks like `twin`, and whose forward is another; `twin` stays as it is.

    Args:
        twin: look of a block.
        forward: function that takes what the block takes.
    """
    made = object.__new__(type(twin))
    made.__dict__.update(twin.__dict__)
    made.__dict__["forward"] = forward
    return made


def other_tensors(place: int | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Returns all tensors in a block's arguments but its hidden states, each with a name for errors.

    Args:
        place: position or name of the hidden states.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    found: list[tuple[str, Tensor]] = []

    def look(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(cast("list[Any]", value)):
                look(item, f"{name}[{index}]")
        elif isinstance(value, dict):
            for key, item in cast("dict[Any, Any]", value).items():
                look(item, f"{name}[{key!r}]")

    for index, value in enumerate(args):
        if index != place:
            look(value, f"argument {index}")
    for name, value in kwargs.items():
        if name != place:
            look(value, f"`{name}`")
    return found


@dataclass(frozen=True, slots=True)
class Form:
    """How a block returns its hidden states, and what beside them.

    Attributes:
        hidden: place of the hidden states in the tuple; None: they are returned bare.
        extras: the other items, with None in the place of the hidden states.
    """

    hidden: int | None = None
    extras: tuple[Any, ...] = ()

    @classmethod
    def of(cls, output: Any) -> Form | None:
        """Returns the form of a block's output; None where it has no hidden states to be found."""
        if isinstance(output, Tensor):
            return cls()
        if not isinstance(output, tuple | list):
            return None
        items = cast("list[Any]", output)
        place = hidden_of(tuple(items), {})
        if not isinstance(place, int):
            return None
        return cls(place, tuple(None if index == place else item for index, item in enumerate(items)))

    def around(self, hidden: Tensor) -> Any:
        """Returns an output of this form."""
        if self.hidden is None:
            return hidden
        return (*self.extras[: self.hidden], hidden, *self.extras[self.hidden + 1 :])


def form_to(form: Form) -> list[Any]:
    """Returns a form as values that can be sent; items that carry gradients are sent as their looks."""
    extras: list[Any] = [
        {"size": list(item.shape), "dtype": str(item.dtype).removeprefix("torch.")}
        if isinstance(item, Tensor) and item.requires_grad
        else item
        for item in form.extras
    ]
    return [form.hidden, extras]


def form_from(sent: Sequence[Any], device: torch.device) -> Form:
    """Returns the form that has been sent; the inverse of `form_to`, with hollow items for looks.

    Args:
        sent: values of `form_to`.
        device: device of the hidden states.
    """
    place, extras = sent
    items: list[Any] = []
    for item in extras:
        if isinstance(item, dict) and set(cast("dict[str, Any]", item)) == {"size", "dtype"}:
            look = cast("dict[str, Any]", item)
            shape = Shape(tuple(look["size"]), getattr(torch, look["dtype"]))
            item = hollow(shape, value=float("nan"), dtype=None, device=device)
        items.append(item)
    return Form(place, tuple(items))


def leaves_of(value: Any) -> Iterator[Tensor]:
    """Yields the leaves that a value's gradients would go to."""
    todo: list[Any] = []

    def look(item: Any) -> None:
        if isinstance(item, Tensor):
            if item.grad_fn is not None:
                todo.append(item.grad_fn)
        elif isinstance(item, list | tuple):
            for part in cast("list[Any]", item):
                look(part)
        elif isinstance(item, Mapping):
            for part in cast("Mapping[Any, Any]", item).values():
                look(part)

    look(value)
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        todo += [following for following, _ in node.next_functions if following is not None]
