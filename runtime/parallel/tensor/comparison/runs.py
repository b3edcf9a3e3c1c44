"""One run of a part of a model, with weights and inputs of its own: what it gives, and the gradients of that.

Knows nothing of ranks. Nothing that a run does is seen outside.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....compat import unseen_by_dispatch_modes
from ....generators import generators_of
from ....kept_results import keeping
from ...hidden_states import hidden_of, value_at
from .values import copied, tensors_in

_GRADIENT = "gradient of "
_SEED = 20_240_601
#: Attributes that every module has.
_OF_TORCH = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Call:
    """What a part of a model is called with.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def hidden(self) -> Tensor | None:
        """The hidden states; None where there is no floating tensor."""
        place = hidden_of(self.args, self.kwargs)
        if place is not None:
            return value_at(place, self.args, self.kwargs)
        found = tensors_in((self.args, self.kwargs))
        return next((value for _, value in found if value.is_floating_point()), None)

    def has_gradients(self) -> bool:
        """Whether its results may be trained by."""
        return torch.is_grad_enabled() or any(value.requires_grad for _, value in tensors_in((self.args, self.kwargs)))


@dataclass(slots=True)
class Run:
    """One run.

    Attributes:
        outputs: floating outputs with their graph, by what messages call them, the hidden states first.
        leaves: inputs and weights that gradients are wanted of, by what messages call their gradients.
        error: error of the forward; None where it has none.
        ran: names of the watched modules that have run.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    leaves: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    error: Exception | None = None
    ran: frozenset[str] = frozenset()

    @property
    def failure(self) -> str:
        """What the forward has failed with; empty where it has not."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def has_numbers(self) -> bool:
        """Whether some output has a finite number."""
        return any(bool(value.detach().isfinite().any()) for value in self.outputs.values())

    def results(self, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Returns some outputs, and the gradients of a sum of them with random weights, the same on all ranks.

        Args:
            outputs: their names.
        """
        found = {name: self.outputs[name] for name in outputs}
        trained = [value for value in found.values() if value.requires_grad]
        generator = torch.Generator().manual_seed(_SEED)
        cotangents = [torch.randn(value.shape, generator=generator).to(value) for value in trained]
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            trained, list(self.leaves.values()), cotangents, allow_unused=True
        )
        gradients = {
            name: torch.zeros_like(leaf) if grad is None else grad  # pyright: ignore[reportUnnecessaryComparison]
            for (name, leaf), grad in zip(self.leaves.items(), grads, strict=True)
        }
        return {**{name: value.detach() for name, value in found.items()}, **gradients}


def gradient_of(parameter: str) -> str:
    """Returns what messages call the gradient of a parameter."""
    return f"{_GRADIENT}`{parameter}`"


def parameter_in(name: str) -> str:
    """Returns the parameter that a result is the gradient of; empty where it is of none."""
    return name.removeprefix(f"{_GRADIENT}`").removesuffix("`") if name.startswith(f"{_GRADIENT}`") else ""


def run_forward(twin: nn.Module, leaves: Mapping[str, Tensor], call: Call, *, watched: Sequence[str] = ()) -> Run:
    """Runs a twin forward, which has its weights, with copies of the arguments in fp32.

    The gradient of the hidden states, the first floating tensor, is always wanted: those of the first block may be
    computed from what is frozen, and in evaluation no input requires gradients.

    Args:
        twin: look of the module, see `with_weights`.
        leaves: weights by name.
        call: arguments.
        watched: names of modules of which it is told whether they ran.
    """
    ran: set[str] = set()
    inputs: dict[str, Tensor] = {}

    def copy_of(path: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.detach().clone()
        made = fp32(value)
        if not value.requires_grad and value is not hidden:
            return made
        inputs[f"{_GRADIENT}argument {path}"] = made.requires_grad_()
        return made.clone()  # a leaf could not be written to

    try:
        hidden = call.hidden()
        given = copied((call.args, dict(call.kwargs)), copy_of)
        before = {id(value): value._version for _, value in tensors_in(given)}  # pyright: ignore[reportPrivateUsage]
        with ExitStack() as stack:
            for name in watched:
                hook = twin.get_submodule(name).register_forward_pre_hook(partial(_note, ran, name))
                stack.callback(hook.remove)
            result = twin(*given[0], **given[1])
    except Exception as error:  # the caller tells, in its own words
        return Run(error=error)
    outputs = _floating(result, "output")
    if not outputs:  # a block that leaves what it computes in an argument
        outputs = {
            name: value
            for name, value in _floating(given, "argument").items()
            if before.get(id(value)) != value._version  # pyright: ignore[reportPrivateUsage]
        }
    weights = {gradient_of(name): leaf for name, leaf in leaves.items() if leaf.requires_grad}
    return Run(outputs, {**inputs, **weights}, ran=frozenset(ran))


def _note(ran: set[str], name: str, module: nn.Module, args: object) -> None:
    ran.add(name)


def _floating(value: Any, label: str) -> dict[str, Tensor]:
    found = tensors_in(value)
    return {f"{label} {path}".rstrip(): tensor for path, tensor in found if tensor.is_floating_point()}


@contextmanager
def with_weights(twin: nn.Module, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> Generator[None]:
    """Inside, a twin has weights, and buffers and attributes of its own: a forward may write to these.

    An attribute that cannot be copied stays the module's.

    Args:
        twin: look of a module.
        weights: weights by name.
        names: all names of the parameters, and by each the first one of the same.
    """
    with ExitStack() as stack:
        memo: dict[int, Any] = {}
        for part in twin.modules():
            own = part.__dict__
            stack.callback(_restore, own, dict(own))
            own["_buffers"] = {key: None if value is None else value.clone() for key, value in own["_buffers"].items()}
            for key, value in own.items():
                if key not in _OF_TORCH and not key.startswith("_dsrun"):
                    with suppress(Exception):
                        own[key] = copied(value, lambda _, tensor: tensor.detach().clone(), memo)
        for name, first in names.items():
            owner, _, key = name.rpartition(".")
            held: dict[str, Any] = twin.get_submodule(owner)._parameters  # pyright: ignore[reportPrivateUsage]
            stack.callback(held.__setitem__, key, None)
            held[key] = weights[first]
        yield


def _restore(own: dict[str, Any], before: Mapping[str, Any]) -> None:
    own.clear()
    own.update(before)


def fp32(value: Tensor) -> Tensor:
    """Returns a copy in fp32, or in fp64 of such a tensor."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)


@contextmanager
def aside(device: torch.device) -> Generator[None]:
    """Inside, nothing that is done is seen outside: no graph, no recomputation, no autocast, no random numbers."""
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    with (
        keeping(None),
        unseen_by_dispatch_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
