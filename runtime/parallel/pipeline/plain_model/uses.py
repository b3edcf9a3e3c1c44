"""When a model uses what is outside of its stack of blocks: before them, between or behind. Cuts nothing.

[Note: dry run]
Order of registration says little: OPT registers its last norm before its layers. So the model's forward runs once on
the CPU, on a few made-up tokens. Blocks hand on what they get, and parameters are hollow, so it costs no memory and no
time to speak of. What it does not reach is placed by order of registration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....stacks import Stack
from ...hidden_states import hidden_of, value_at
from ...twins import twin_of
from .stand_ins import Form, Shape, acting, hollow

#: Tokens of the made-up sequence.
_LENGTH = 8
#: Ways in which blocks return their hidden states, likeliest first.
_FORMS = (Form(), Form(0, (None,)), Form(0, (None, None)), Form(0, (None, None, None)))
_PRODUCTS: set[Callable[..., Any]] = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.addmm}
#: Functions that take no values from a tensor.
_NO_USE = {
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of a parameter outside of the stack.

    Attributes:
        name: qualified name, by which the module is first met.
        owner: module that has it.
        attribute: name in that module.
        is_before: whether it is registered before the stack.
    """

    name: str
    owner: nn.Module
    attribute: str
    is_before: bool

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        return cast("nn.Parameter", self.owner._parameters[self.attribute])  # pyright: ignore[reportPrivateUsage]


@dataclass(slots=True)
class Uses:
    """What a dry run has seen.

    Attributes:
        phases: numbers of blocks that were called before each use, by the name of the slot.
        order: number of each block in the order of calls.
        reached: whether the first block was called.
    """

    phases: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    order: list[int] = field(default_factory=list[int])
    reached: bool = False


def slots_of(model: nn.Module, stack: Stack) -> list[Slot]:
    """Returns the places of parameters outside of a stack, in order of registration; a shared module's once."""
    inside = {id(part) for _, block in stack.blocks for part in block.modules()}
    first = id(stack.blocks[0][1])
    found: list[Slot] = []
    is_before = True
    for name, module in model.named_modules():
        if id(module) == first:
            is_before = False
        if id(module) in inside:
            continue
        prefix = f"{name}." if name else ""
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            del param
            # Parameters of a module that is around the stack come before it: positions, for the most part.
            found.append(Slot(prefix + attribute, module, attribute, is_before))
    return found


def find_uses(model: nn.Module, stack: Stack, slots: Sequence[Slot]) -> Uses:
    """Runs a model dry; see [Note: dry run]. Its values and the state of torch's generators stay as they are.

    Args:
        model: whole model, on any device, meta among them.
        stack: its stack.
        slots: places of parameters outside of the stack.
    """
    best = Uses()
    twin, names, container = _twin(model, stack, slots)
    looks = {name: twin_of(block, with_tensors=False) for name, block in stack.blocks}
    for made_up in _inputs(model, slots):
        for form in _FORMS:
            seen = _run(twin, names, container, stack, looks, form, made_up)
            if (seen.reached, len(seen.order)) > (best.reached, len(best.order)):
                best = seen
            if len(best.order) >= len(stack.blocks):
                return best
            if not seen.reached:
                break
    return best


class _Watch(TorchFunctionMode):
    """Notes which hollow parameters functions are given, and spares large products.

    Args:
        names: name of the slot of each hollow parameter, by its id.
        seen: record of uses, which is filled.
    """

    def __init__(self, names: Mapping[int, str], seen: Uses) -> None:
        super().__init__()
        self._names = names
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs a function of torch."""
        given = kwargs or {}
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            out = _product(func, args, given) if func in _PRODUCTS else func(*args, **given)
        if getattr(func, "__name__", "") not in _NO_USE and _holds_tensor(out):
            for value in _flat((*args, *given.values())):
                name = self._names.get(id(value))
                if name is not None:
                    self._seen.phases.setdefault(name, set()).add(len(self._seen.order))
        return out


def _product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns zeros of the shape of a product, whose spread weight would be copied first if it were computed."""

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    out = func(*map(on_meta, args), **{name: on_meta(value) for name, value in kwargs.items()})
    return torch.zeros(out.shape, dtype=out.dtype)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(item, Tensor) for item in _flat((value,)))


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(cast("list[Any]", value))
        else:
            yield value


def _run(
    model: nn.Module,
    names: Mapping[int, str],
    container: nn.Module,
    stack: Stack,
    looks: Mapping[str, nn.Module],
    form: Form,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> Uses:
    seen = Uses()
    shapes: list[torch.Size] = []

    def passing(number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            place = hidden_of(args, kwargs)
            if place is None:
                raise _WrongForm
            hidden: Tensor = value_at(place, args, kwargs)
            seen.reached = True
            if shapes and hidden.shape != shapes[0]:
                raise _WrongForm
            shapes.append(hidden.shape)
            seen.order.append(number)
            return form.around(hidden)

        return forward

    for number, (name, _) in enumerate(stack.blocks):
        container._modules[name.rpartition(".")[2]] = acting(looks[name], passing(number))  # pyright: ignore[reportPrivateUsage]
    args, kwargs = inputs
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), _Watch(names, seen):
            model(*args, **kwargs)
    except Exception:
        # The made-up inputs, or the form in which blocks return, are not the model's: what was seen until then counts.
        pass
    return seen


class _WrongForm(Exception):
    """A block was not given what the block before it returned."""


def _twin(model: nn.Module, stack: Stack, slots: Sequence[Slot]) -> tuple[nn.Module, dict[int, str], nn.Module]:
    """Makes a look of the model on the CPU with hollow parameters, whose forward changes nothing of the model."""
    container_module = model.get_submodule(stack.name)
    known: dict[int, nn.Module] = {}
    twin = twin_of(model, with_tensors=True, known=known)
    names: dict[int, str] = {}
    cpu = torch.device("cpu")
    inside = {id(part) for _, block in stack.blocks for part in block.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        made = known[id(module)]
        made.__dict__["_buffers"] = {
            name: None if buffer is None else _on_cpu(buffer)
            for name, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
        }
    for slot in slots:
        shape = Shape(tuple(slot.param.shape), slot.param.dtype)
        param = hollow(shape, value=0.0, dtype=torch.float32, device=cpu)
        known[id(slot.owner)]._parameters[slot.attribute] = param  # pyright: ignore[reportPrivateUsage]
        names[id(param)] = slot.name
    return twin, names, known[id(container_module)]


def _on_cpu(buffer: Tensor) -> Tensor:
    if buffer.is_meta:
        return torch.zeros(buffer.shape, dtype=buffer.dtype)
    return buffer.detach().to("cpu", copy=True)


def _inputs(model: nn.Module, slots: Sequence[Slot]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields made-up inputs: tokens, then numbers as wide as a layer outside of the stack takes them."""
    kwargs = {"use_cache": False} if takes(model, "use_cache") else {}
    for length in (_LENGTH, 2, 1):
        yield (torch.ones((1, length), dtype=torch.long),), kwargs
    owners = [slot.owner for slot in slots]
    widths = [owner.in_features for owner in owners if isinstance(owner, nn.Linear)]
    widths += [owner.normalized_shape[-1] for owner in owners if isinstance(owner, nn.LayerNorm)]
    for width in dict.fromkeys(widths):
        yield (torch.zeros((1, _LENGTH, width)),), kwargs


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model's forward has an argument of that name."""
    return name in inspect.signature(model.forward).parameters


def phases_of(stack: Stack, slot: Slot, uses: Uses) -> set[int]:
    """Returns the numbers of blocks that are called before each use; by order of registration where none is seen.

    Args:
        stack: stack of the model.
        slot: place outside of it.
        uses: record of the dry run.
    """
    return uses.phases.get(slot.name) or {0 if slot.is_before else len(stack.blocks)}
