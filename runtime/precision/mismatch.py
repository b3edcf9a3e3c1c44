"""Which input of a forward has a dtype or a device that the model cannot take, where torch says only that two differ.

Casts and moves nothing, and says nothing of errors that are about something else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dsrun.errors import ModelError

#: Of a list of names, as many as a line has room for.
_SHOWN = 3
#: What torch says of an operation whose tensors do not go together.
_IS_MISMATCH = re.compile(
    r"same dtype|scalar type|mixed dtype|type \(.*\) should be the same|dtype .* does not match|must have the type"
    r"|attn_mask dtype|target dtype|Found dtype|dtypes match|floating point type for target"
    r"|not implemented for '\w+'|can't be cast to the desired output type"
)
#: What it says where they are on several devices.
_IS_ELSEWHERE = re.compile(r"same device|expected device")
#: Where it wants whole numbers: of embeddings, and of classes.
_WANTS_INDICES = re.compile(r"'indices'|target dtype to be Long|scalar type Long but|\"nll_loss")
_HAS_INDICES = re.compile(r"label|target|class|ids|ind(ex|ices)", re.IGNORECASE)
_IS_MASK = re.compile(r"attn_mask")
#: What it says where an operation does not know a dtype, whatever its tensors are.
_NO_KERNEL = re.compile(r"not implemented for '(\w+)'")
#: What it was given in place of what it wants, in its own words for dtypes.
_GIVEN = re.compile(r"(?:got|found|for) '?(?:torch\.)?(?:cuda\.)?(\w+?)(?:Tensor)?\b")
_DTYPES = {
    "BFloat16": torch.bfloat16,
    "Half": torch.float16,
    "Float": torch.float32,
    "Double": torch.float64,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
_SECTIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class MismatchError(ModelError):
    """An input that the model cannot take; scripts that catch what torch raises of it catch this as well."""


def mismatch_of(
    error: Exception,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    compute: torch.dtype,
    autocast: torch.dtype | None,
    casts: bool,
) -> MismatchError | None:
    """Returns an error that names the inputs and the way out; None where torch's is about something else.

    Args:
        error: exception that the forward has raised.
        forward: forward of the model, for the names of its parameters.
        args: positional arguments, as the model got them.
        kwargs: keyword arguments, as the model got them.
        device: device of the model's parameters.
        compute: their dtype.
        autocast: dtype of `torch.autocast` around the forward; None: there is none.
        casts: `fp16.auto_cast` has cast floating-point inputs.
    """
    if type(error).__module__.partition(".")[0] not in ("builtins", "torch"):
        return None  # a script's own, which it may wait for
    said = str(error).partition("\n")[0]
    is_elsewhere = _IS_ELSEWHERE.search(said)
    if not is_elsewhere and not _IS_MISMATCH.search(said):
        return None
    inputs = dict(_named_tensors(forward, args, kwargs))
    if is_elsewhere:
        away = [f"`{name}` is on {x.device}" for name, x in inputs.items() if x.device != device]
        what = f"{_listed(away) or 'a tensor that the forward makes is elsewhere'}, and the model is on {device}"
        hint = "move inputs with .to(engine.device), and give torch.zeros and its like device=x.device"
        return MismatchError(f"engine(...): {what}: {said}", hint=hint)
    explained = _explain(said, inputs, compute=compute, autocast=autocast, casts=casts)
    if explained is None:
        return None
    what, hint = explained
    return MismatchError(f"engine(...): {what}: {said}", hint=hint)


def _explain(
    said: str, inputs: Mapping[str, Tensor], *, compute: torch.dtype, autocast: torch.dtype | None, casts: bool
) -> tuple[str, str] | None:
    """Returns what does not go together, and the way out; None where torch says all that there is to say."""
    no_kernel = _NO_KERNEL.search(said)
    unknown = _DTYPES.get(no_kernel[1]) if no_kernel else None
    if unknown in (torch.bfloat16, torch.float16) and unknown in (compute, autocast):
        reason = _reason(compute) if unknown == compute else ", for `torch_autocast` is enabled"
        return f"the model computes in {_name(unknown)}{reason}, and an operation of it cannot", (
            "compute that one in float32: cast what it takes with .float(), and what it gives with .to(x.dtype)"
        )
    if _WANTS_INDICES.search(said):
        return _listed_dtypes(_no_indices(said, inputs)) or "a tensor of indices has another dtype", (
            "indices and classes are whole numbers: give them as int64, and cast floating-point inputs alone"
        )
    if _IS_MASK.search(said):
        masks = {name: x for name, x in inputs.items() if "mask" in name.lower() and x.dtype != compute}
        if masks:
            return _listed_dtypes(masks), "give the attention a mask of bool, true where it looks: mask.bool()"
    model = f"the model's parameters are {_name(compute)}{_reason(compute)}"
    floats = {name: x for name, x in inputs.items() if x.is_floating_point() and x.dtype != compute}
    taken = {torch.float32, autocast} if autocast is not None else set[torch.dtype | None]()
    odd = {name: x for name, x in floats.items() if x.dtype not in taken}
    whole = {name: x for name, x in inputs.items() if not x.is_floating_point() and not x.is_complex()}
    cast_it = f".to(torch.{_name(compute)})"
    if odd:
        return f"{_listed_dtypes(odd)}, and {model}", f"cast with {cast_it}{_other_way(odd, compute, casts=casts)}"
    if whole and re.search(r"\b(Long|long int|Int|int|Short|short|Char|Byte|Bool|bool|torch\.u?int\d+)\b", said):
        return (
            f"{_listed_dtypes(whole)}, and {model}",
            f"what the model multiplies wants floating-point numbers: {cast_it}",
        )
    if no_kernel:
        return None
    return f"a tensor that the forward makes has another dtype, and {model}", (
        "give torch.zeros, torch.ones and their like dtype=x.dtype of the tensor that they meet, for they make "
        "float32 without" + ("" if autocast is not None else ', or set "torch_autocast": {"enabled": true}')
    )


def _no_indices(said: str, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the inputs that may be what torch would have indices for, by their dtype and, if need be, their names."""
    given = {_DTYPES[word] for word in _GIVEN.findall(said) if word in _DTYPES}
    odd = {name: x for name, x in inputs.items() if (x.dtype in given if given else x.dtype != torch.int64)}
    return {name: x for name, x in odd.items() if _HAS_INDICES.search(name)} or odd


def _other_way(odd: Mapping[str, Tensor], compute: torch.dtype, *, casts: bool) -> str:
    """Returns what a config can do about inputs; nothing where it can do nothing."""
    dtypes = {x.dtype for x in odd.values()}
    if compute == torch.float16 and not casts:
        return ", or let the config do it: `fp16.auto_cast` true"
    if compute == torch.bfloat16 and dtypes == {torch.float32}:
        return ', or let the config do it: "torch_autocast": {"enabled": true}'
    if compute == torch.float32 and len(dtypes) == 1 and (section := _SECTIONS.get(next(iter(dtypes)))):
        return f', or train in it: "{section}": {{"enabled": true}}'
    return ""


def _reason(compute: torch.dtype) -> str:
    section = _SECTIONS.get(compute)
    return ", for neither `bf16` nor `fp16` is enabled" if section is None else f", for `{section}` is enabled"


def _listed_dtypes(tensors: Mapping[str, Tensor]) -> str:
    return _listed([f"`{name}` is {_name(x.dtype)}" for name, x in tensors.items()])


def _listed(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - _SHOWN} more inputs likewise"] if len(texts) > _SHOWN else []
    return ", ".join([*texts[:_SHOWN], *more])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named_tensors(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    try:
        named = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or another one than it is called by
        named = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
    for name, value in named.items():
        # What `**kwargs` collects goes by its own names.
        yield from _tensors_in("" if name == "kwargs" else name, value)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        items = [(f"{name}[{key!r}]" if name else str(key), item) for key, item in mapping.items()]
    elif isinstance(value, list | tuple):
        sequence = cast("list[Any] | tuple[Any, ...]", value)
        items = [(f"{name}[{number}]", item) for number, item in enumerate(sequence)]
    elif is_dataclass(value):
        items = [(f"{name}.{field.name}", getattr(value, field.name, None)) for field in fields(value)]
    for place, item in items:
        yield from _tensors_in(place, item)
