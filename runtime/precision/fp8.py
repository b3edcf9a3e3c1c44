"""Linear layers that multiply in fp8, by torchao: which ones, what they need, and their exchange in a model.

Weights, their gradients and everything else stay in the formats of the config; torchao scales and rounds inputs,
weights and gradients to 8 bits for each product. Imports torchao only where it is used.

[Note: which layers]
`nn.Linear` itself and no subclass, whose widths are both multiples of 16 (what the kernels take), and that no pattern
excludes. A model that is one linear layer stays as it is: the script holds it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dsrun.config.sections.precision import Fp8
from dsrun.errors import ConfigError, ModelError

from .patterns import match_names

#: torch._scaled_mm takes widths that are multiples of it.
WIDTH_MULTIPLE = 16
#: The first GPUs that multiply in fp8: Ada.
CAPABILITY = (8, 9)
_KEY = "fp8.enabled"


@dataclass(frozen=True, slots=True)
class Fp8Layers:
    """Linear layers of a model by what becomes of them.

    Attributes:
        taken: names of the layers that multiply in fp8.
        left: the other ones', each with the reason.
    """

    taken: tuple[str, ...]
    left: Mapping[str, str]


def use_fp8(model: nn.Module, section: Fp8, device: torch.device) -> Fp8Layers:
    """Puts torchao's layers in the place of a model's, see [Note: which layers]; parameters stay the same objects.

    Args:
        model: model on any device, before its parameters are cut; some of its modules are replaced.
        section: section `fp8` of the config.
        device: device that the model is to compute on.

    Raises:
        ConfigError: the device cannot multiply in fp8, or torchao is not there.
        ModelError: a pattern matches no linear layer, or no layer is left that can.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    has_torchao = importlib.util.find_spec("torchao") is not None
    check_needs(device.type, capability, has_torchao=has_torchao, emulate=section.emulate)
    chosen = choose_layers(model, section.exclude)
    if not chosen.taken:
        reasons = "; ".join(f"`{name}` {reason}" for name, reason in list(chosen.left.items())[:3])
        raise ModelError(
            f"`{_KEY}` is true, and the model has no linear layer that can multiply in fp8: "
            f"{reasons or 'it has none at all'}",
            hint=f"widths must be multiples of {WIDTH_MULTIPLE}; leave the section `fp8` out for this model",
        )
    taken = frozenset(chosen.taken)
    float8: Any = importlib.import_module("torchao.float8")
    recipe = float8.Float8LinearConfig.from_recipe_name(section.recipe)
    # The number of tokens is a width too, in the product that gives a weight's gradient, and may be any.
    layer_config = replace(recipe, pad_inner_dim=True, emulate=section.emulate)

    def is_taken(_: nn.Module, name: str) -> bool:
        return name in taken

    float8.convert_to_float8_training(model, config=layer_config, module_filter_fn=is_taken)
    return chosen


def check_needs(kind: str, capability: tuple[int, int] | None, *, has_torchao: bool, emulate: bool) -> None:
    """Refuses where fp8 cannot be had, naming what is missing.

    Args:
        kind: type of the device: `cuda`, `cpu`.
        capability: compute capability of a CUDA device; None for other devices.
        has_torchao: the package is installed.
        emulate: products are made in the model's own format, of values that are rounded to fp8: on any device.

    Raises:
        ConfigError: naming the need and how to meet it.
    """
    least = ".".join(map(str, CAPABILITY))
    elsewhere = "`fp8.emulate` true rounds values to fp8 on any device, without its speed; or leave out the section"
    if not emulate and capability is None:
        raise ConfigError(
            f"`{_KEY}` is true, and this rank computes on {kind}; expected a CUDA GPU of compute capability {least} or "
            "more (Ada, Hopper, Blackwell)",
            hint=elsewhere,
        )
    if not emulate and capability is not None and capability < CAPABILITY:
        raise ConfigError(
            f"`{_KEY}` is true, and this GPU has compute capability {'.'.join(map(str, capability))}; expected {least} "
            "or more (Ada, Hopper, Blackwell)",
            hint=elsewhere,
        )
    if not has_torchao:
        raise ConfigError(
            f"`{_KEY}` is true, and the package torchao is not installed", hint="pip install 'dsrun[torchao]'"
        )


def choose_layers(model: nn.Module, exclude: Sequence[str]) -> Fp8Layers:
    """Returns what becomes of each linear layer, see [Note: which layers].

    Args:
        model: model on any device.
        exclude: patterns of names, see `match_names`.

    Raises:
        ModelError: a pattern matches no linear layer.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    excluded = match_names(exclude, layers, key="fp8.exclude", noun="linear layer")
    reasons = {name: _why_not(name, layer, is_excluded=name in excluded) for name, layer in layers.items()}
    return Fp8Layers(
        tuple(name for name, reason in reasons.items() if reason is None),
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


def _why_not(name: str, layer: nn.Linear, *, is_excluded: bool) -> str | None:
    if is_excluded:
        return "is excluded"
    if not name:
        return "is the model itself"
    if type(layer) is not nn.Linear:
        return f"is a {type(layer).__name__}"
    odd = [width for width in (layer.in_features, layer.out_features) if width % WIDTH_MULTIPLE]
    return f"has a width of {odd[0]}" if odd else None
