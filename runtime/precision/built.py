"""Dtypes that a model was built in and does not keep: said once, and refused where numbers would be lost unasked.

Casts nothing; which dtype a tensor gets is the policy's business, and see docs/decisions/0042.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dsrun.config.config import Config
from dsrun.errors import ModelError, Problem

from .fp32_modules import find_fp32_modules
from .policy import PrecisionPolicy

#: Of a list of names, as many as a line has room for.
_SHOWN = 3
_KEEPS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def changed_dtypes(model: nn.Module, config: Config, precision: PrecisionPolicy) -> list[str]:
    """Returns a line for each change of dtypes that the config has not asked for by its format alone.

    fp32 that becomes the format of the enabled section is what that section asks for. No line is returned for it, nor
    for numbers that are not floating.

    Args:
        model: model as the script gave it.
        config: config of the engine.
        precision: precision policy that the config asks for.

    Raises:
        ModelError: trained or frozen parameters are float64 and no key names a format; or a tensor is in 8 bits, whose
            scale is not to be seen.
    """
    kept = find_fp32_modules(model, config.data_types.keep_in_fp32_modules, compute=precision.compute).tensors
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    asked = config.fp16.enabled or config.bf16.enabled or config.data_types.param_dtype is not None
    _refuse({**params, **buffers}, {} if asked else params)
    lines: list[str] = []
    for noun, tensors, goal in (
        ("parameter", params, precision.compute),
        ("buffer", buffers, precision.buffers or precision.compute),
    ):
        changes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
        for name, tensor in tensors.items():
            to = torch.float32 if id(tensor) in kept else goal
            if tensor.is_floating_point() and tensor.dtype not in (to, torch.float32):
                changes.setdefault((tensor.dtype, to), []).append(name)
        for (built, to), names in changes.items():
            reason = _reason(config, precision, noun, built, to)
            now = f"{'are' if len(names) > 1 else 'is'} {_said(to)} here"
            lines.append(f"dsrun: {_counted(names, noun)} built in {_said(built)} and {now}: {reason}")
    return lines


def _refuse(tensors: Mapping[str, Tensor], unasked: Mapping[str, Tensor]) -> None:
    """See `changed_dtypes`; `unasked` are parameters whose format no key names."""
    problems: list[Problem] = []
    double = [name for name, param in unasked.items() if param.dtype == torch.float64]
    if double:
        problems.append(
            Problem(
                f"model: {_counted(double, 'parameter')} built in float64; dsrun trains in fp32, bf16 or fp16",
                'call model.float() before dsrun.initialize, or write "data_types": {"param_dtype": "fp32"}, which '
                "casts them",
            )
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
            problems.append(
                Problem(
                    f"model: `{name}` is {_said(tensor.dtype)}; a cast would leave out the scale that belongs to it",
                    "keep it as `view(torch.uint8)`, or give the model its values in bf16",
                )
            )
    if problems:
        raise ModelError.of(problems)


def _reason(config: Config, precision: PrecisionPolicy, noun: str, built: torch.dtype, to: torch.dtype) -> str:
    """Returns which key decides, as a sentence goes on."""
    if noun == "buffer" and precision.buffers is not None and to == precision.buffers:
        return f'`data_types.buffer_dtype` is "{config.data_types.buffer_dtype}"'
    if to != precision.compute:
        return "`data_types.keep_in_fp32_modules` names them"
    if to != torch.float32:
        return f"`{_KEEPS[to]}.enabled` is true"
    way = f', "{_KEEPS[built]}": {{"enabled": true}} keeps them' if built in _KEEPS else ""
    way = f', `data_types.buffer_dtype` "{_KEEPS[built]}" keeps them' if way and noun == "buffer" else way
    return f"neither `bf16` nor `fp16` is enabled{way}"


def _counted(names: list[str], noun: str) -> str:
    """Returns how many there are, with the first names: `2 parameters (`a`, `b`) were`."""
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN]) + (", ..." if names[_SHOWN:] else "")
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''} ({shown}) {'were' if len(names) > 1 else 'was'}"


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
