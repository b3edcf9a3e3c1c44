"""Which input of a forward has a dtype or a device that the model cannot take, where torch says only that two differ.

Casts and moves nothing, and says nothing of errors that are about something else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_WANTS_INDICES = re.compile(r"'indices'|target dtype to be Long")
_IS_MASK = re.compile(r"attn_mask")
_SECTIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


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
) -> ModelError | None:
    """Returns an error that names the inputs and the way out; None where torch's is about something else.

    Args:
        error: that the forward has raised.
        forward: of the model, for the names of its parameters.
        args: positional arguments, as the model got them.
        kwargs: named ones.
        device: of the model's parameters.
        compute: their dtype.
        autocast: dtype of `torch.autocast` around the forward; None: there is none.
        casts: `fp16.auto_cast` has cast floating-point inputs.
    """
    said = str(error).partition("\n")[0]
    is_elsewhere = _IS_ELSEWHERE.search(said)
    if not is_elsewhere and not _IS_MISMATCH.search(said):
        return None
    inputs = dict(_named_tensors(forward, args, kwargs))
    if is_elsewhere:
        away = [f"`{name}` is on {x.device}" for name, x in inputs.items() if x.device != device]
        what = f"{_listed(away) or 'a tensor that the forward makes is elsewhere'}, and the model is on {device}"
        hint = "move inputs with .to(engine.device), and give torch.zeros and its like device=x.device"
        return ModelError(f"engine(...): {what}: {said}", hint=hint)
    what, hint = _explain(said, inputs, compute=compute, autocast=autocast, casts=casts)
    return ModelError(f"engine(...): {what}: {said}", hint=hint)


def _explain(
    said: str, inputs: Mapping[str, Tensor], *, compute: torch.dtype, autocast: torch.dtype | None, casts: bool
) -> tuple[str, str]:
    """Returns what does not go together, and the way out."""
    if _WANTS_INDICES.search(said):
        odd = {name: x for name, x in inputs.items() if x.dtype not in (torch.int64, torch.int32)}
        return _listed_dtypes(odd) or "a tensor of indices is none of whole numbers", (
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
    return f"a tensor that the forward makes has another dtype, and {model}", (
        "give torch.zeros, torch.ones and their like dtype=x.dtype of the tensor that they meet, for they make "
        "float32 without" + ("" if autocast is not None else ', or set "torch_autocast": {"enabled": true}')
    )


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
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _tensors_in(f"{name}[{key!r}]" if name else str(key), item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(cast("list[Any] | tuple[Any, ...]", value)):
            yield from _tensors_in(f"{name}[{number}]", item)
