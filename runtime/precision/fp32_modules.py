"""What of a 16-bit model stays in fp32: tensors by name patterns, and the casts at the borders of such modules.

Which buffers the parameters then lie in is decided in `zero`. Without 16 bits nothing stays anything.

[Note: borders]
A module whose parameters all stay in fp32 gets its floating inputs in fp32, and what it returns is cast back: unless
its inputs came in fp32 already, for then the model itself knows (transformers' T5 casts around `wo`). Inside of such a
module no inner one casts. A module that has only some parameters in fp32 computes as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .casting import cast_floating
from .patterns import match_names, matches

_KEY = "data_types.keep_in_fp32_modules"
#: Attribute of a model: the hooks at its borders.
_HANDLES = "_dsrun_fp32_borders"


@dataclass(frozen=True, slots=True)
class Fp32Modules:
    """What stays in fp32.

    Attributes:
        tensors: ids of parameters and buffers.
        modules: those with borders, see [Note: borders].
    """

    tensors: frozenset[int] = frozenset()
    modules: tuple[nn.Module, ...] = ()


def find_fp32_modules(
    model: nn.Module, patterns: Literal["auto"] | Sequence[str], *, compute: torch.dtype
) -> Fp32Modules:
    """Finds what stays in fp32.

    Args:
        model: its parameters may be anywhere.
        patterns: patterns of names of parameters and buffers, see `match_names`. `auto`: buffers that transformers'
            lists in the model's classes name, as DeepSpeed does, and no parameters.
        compute: dtype of the others.

    Raises:
        ModelError: a pattern matches nothing; also where all is fp32.
    """
    tensors = {name: tensor for name, tensor in _named_tensors(model) if tensor.is_floating_point()}
    if patterns == "auto":
        listed = set(_listed(model, half=compute == torch.float16))
        buffers = {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
        names = {name for name in buffers if any(name.startswith(at) and matches(p, name) for at, p in listed)}
    else:
        names = match_names(patterns, tensors, key=_KEY, noun="parameter or buffer")
    if compute == torch.float32:
        return Fp32Modules()
    kept = frozenset(id(tensors[name]) for name in names)
    return Fp32Modules(
        kept, tuple(module for module in model.modules() if module is not model and _is_whole(module, kept))
    )


def cast_at_borders(model: nn.Module, kept: Fp32Modules, compute: torch.dtype) -> None:
    """Places the hooks of [Note: borders], and takes those of an engine before off.

    They stay when an engine is gone, for so do the dtypes of parameters.

    Args:
        model: model that gets the hooks and remembers them.
        kept: tensors and modules that stay in fp32.
        compute: dtype that the rest of the model computes in.
    """
    for handle in model.__dict__.pop(_HANDLES, ()):
        handle.remove()
    borders = _Borders(compute)
    handles: list[RemovableHandle] = []
    for module in kept.modules:
        handles.append(module.register_forward_pre_hook(borders.enter, with_kwargs=True))
        handles.append(module.register_forward_hook(borders.leave, always_call=True))
    if handles:
        model.__dict__[_HANDLES] = handles


class _Borders:
    """The hooks of one model.

    Args:
        compute: dtype that the rest of the model computes in; see `cast_at_borders`.
    """

    def __init__(self, compute: torch.dtype) -> None:
        self._compute = compute
        self._casts_back: list[bool] = []  # of the modules whose forward runs, from the outermost in

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._casts_back:
            self._casts_back.append(False)
            return None
        dtypes = {tensor.dtype for tensor in _floating([args, kwargs])}
        self._casts_back.append(dtypes != {torch.float32})
        return cast_floating((args, kwargs), torch.float32)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, self._compute) if self._casts_back.pop() and output is not None else None


def _is_whole(module: nn.Module, kept: frozenset[int]) -> bool:
    """Whether a module has parameters, and all of them stay."""
    params = list(module.parameters())
    return bool(params) and all(id(param) in kept for param in params)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers, tied ones by each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _listed(model: nn.Module, *, half: bool) -> Iterator[tuple[str, str]]:
    """Yields (beginning of names, pattern) of what classes of transformers want in fp32.

    `_keep_in_fp32_modules_strict` in either 16-bit format, `_keep_in_fp32_modules` in fp16 alone.
    """
    for name, module in model.named_modules():
        for attribute in ("_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if half else [])):
            for pattern in getattr(module, attribute, None) or ():
                yield f"{name}." if name else "", str(pattern)


def _floating(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors in an argument, inside of lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from _floating(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[Any]", value):
            yield from _floating(item)
