"""Layers of a pipeline, weighed without being built, and built alike whoever builds them. Knows no stages.

[Note: first values of layers]
First values of a layer that is built here depend on `base_seed` and the layer's number alone, so they are the same for
all numbers of stages and chunks, and the layers of a key begin with equal ones. A layer that is a module already begins
with the values that it has on the first rank of its stage. The script's own random generators are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsrun.errors import DsrunError, ModelError

from ....generators import host_kept, seed_host
from ....stacks import AbsentBlock
from ...twins import twin_of
from ..layers import LayerSpec


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """What is known of a layer that need not be here.

    Attributes:
        trainable: number of parameters that are trained.
        place: module that stands for the layer on other ranks; None for a function.
    """

    trainable: int
    place: AbsentBlock | None


@dataclass(frozen=True, slots=True)
class Seeds:
    """How a layer's random generators are seeded.

    Attributes:
        base: number that the layer's is added to.
        seed: function that seeds all generators of the process; None: Python's, numpy's and torch's are seeded.
    """

    base: int
    seed: Callable[[int], object] | None = None

    def set(self, number: int) -> None:
        """Seeds the generators of the process, those of devices as well.

        Args:
            number: seed.
        """
        if self.seed is not None:
            self.seed(number)
        else:
            seed_host(number)
            torch.manual_seed(number)

    @contextmanager
    def of_layer(self, index: int) -> Generator[None]:
        """Inside, the generators are those of a layer; outside, nothing was drawn. See [Note: first values of layers].

        Args:
            index: number of the layer.
        """
        with ExitStack() as stack:
            stack.enter_context(host_kept())
            if torch.cuda.is_available():
                stack.enter_context(torch.random.fork_rng(devices=[torch.cuda.current_device()]))
            self.set(self.base + index)
            yield


def label_of(layer: Any) -> str:
    """Returns the name of a layer's class, or of the function that it is; empty for a function without a name."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", "")


def weigh(layer: Any, index: int) -> LayerWeight:
    """Returns what other ranks know of a layer; a `LayerSpec` is built on the meta device, which takes no memory.

    Args:
        layer: module, `LayerSpec` or function.
        index: number of the layer, for errors.

    Raises:
        ModelError: the layer cannot be built on the meta device.
    """
    if isinstance(layer, LayerSpec):
        module = _on_meta(layer, index)
    elif isinstance(layer, nn.Module):
        module = layer
    else:
        return LayerWeight(0, None)
    trainable = sum(param.numel() for param in module.parameters() if param.requires_grad)
    return LayerWeight(trainable, AbsentBlock.of(module))


def _on_meta(spec: LayerSpec, index: int) -> nn.Module:
    try:
        with host_kept(), torch.device("meta"):
            return spec.build()
    except DsrunError:
        raise
    except Exception as error:
        raise ModelError(
            f"PipelineModule: layer {index}, {spec!r}, cannot be built on the meta device, where it is counted for "
            f"ranks that do not have it: {type(error).__name__}: {error}",
            hint="let its class make tensors only, and read their values after it is built",
        ) from error


def twins_on_meta(layers: Sequence[Any]) -> list[Any]:
    """Returns layers of which modules have their parameters on the meta device; those they share, they still share.

    Args:
        layers: modules, `LayerSpec`s and functions.
    """
    twins: dict[int, nn.Module] = {}
    params: dict[int, nn.Parameter] = {}

    def on_meta(param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None:
            return None
        if id(param) not in params:
            values = torch.empty_like(param, device="meta")
            params[id(param)] = nn.Parameter(values, requires_grad=param.requires_grad)
        return params[id(param)]

    made = [twin_of(one, with_tensors=False, known=twins) if isinstance(one, nn.Module) else one for one in layers]
    for part in (part for one in layers if isinstance(one, nn.Module) for part in one.modules()):
        own = part._parameters  # pyright: ignore[reportPrivateUsage]
        twins[id(part)]._parameters.update((name, on_meta(param)) for name, param in own.items())  # pyright: ignore[reportPrivateUsage]
    return made


def with_forward(module: nn.Module, function: Callable[[Any, Any], Any]) -> None:
    """Has a module's call do `function(module, value)`, with the hooks of a call.

    A call of `module.forward` inside of the function is the forward of its class.

    Args:
        module: module, of which this is the only use.
        function: function of the module and the value.
    """
    overridden: Any = module
    overridden.forward = _Forward(module, function)


class _Forward:
    """A forward in place of a module's own."""

    def __init__(self, module: nn.Module, function: Callable[[Any, Any], Any]) -> None:
        self._module = module
        self._function = function
        self._own = module.forward
        self._is_inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return self._own(*args, **kwargs)
        self._is_inside = True
        try:
            return self._function(self._module, *args, **kwargs)
        finally:
            self._is_inside = False
