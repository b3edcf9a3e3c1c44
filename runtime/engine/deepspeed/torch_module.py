"""The engine as a torch module: scripts make it a part of other modules, walk over it, and take its state dict.

Its one child is the model, under the name `module`. So `parameters()`, `modules()`, `state_dict()` and their kin are
torch's own; what would take the model's parameters out of the engine's memory is refused here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from .missing import ENGINE


class TorchModule(nn.Module):
    """What torch's modules do and an engine does otherwise; attributes that it does not have are the model's."""

    def __getattr__(self, name: str) -> Any:
        parts: dict[str, nn.Module] | None = self.__dict__.get("_modules")
        if parts is None or name.startswith("__"):
            raise AttributeError(name)
        if name in parts:
            return parts[name]
        for kind in ("_parameters", "_buffers"):  # of a script that has given the engine some of its own
            if name in self.__dict__[kind]:
                return self.__dict__[kind][name]
        module = parts.get("module")
        if module is None:
            raise AttributeError(name)
        try:
            return getattr(module, name)
        except AttributeError:
            reason = f": {ENGINE[name]}" if name in ENGINE else ""
            kind = type(module).__name__
            raise AttributeError(f"neither {type(self).__name__} nor {kind} has `{name}`{reason}") from None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Does nothing where `fn` changes nothing, as a move to the present device; what torch's conversions call.

        Args:
            fn: conversion or move of a tensor.
            recurse: torch's argument, without effect.

        Raises:
            ModelError: `fn` would give the parameters another dtype, device or memory.
        """
        with torch.no_grad():
            for dtype, device in {(each.dtype, each.device) for each in chain(self.parameters(), self.buffers())}:
                probe = _probe(dtype, device)
                was_shared = probe.is_shared()
                result = fn(probe)
                if not (result is probe or _is_move_to_cpu(probe, result)) or probe.is_shared() != was_shared:
                    _refuse_change(probe, result)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ModelError(
            "copy.deepcopy: an engine cannot be copied: it has process groups, and its hooks are on its model",
            hint="copy the model before dsrun.initialize and make a second engine; `engine.module_state_dict()` has "
            "the weights",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(
            "pickle: an engine cannot be pickled: it has process groups, and its hooks are on its model",
            hint="`engine.save_checkpoint` saves all there is; `torch.save(engine.module_state_dict(), ...)` the "
            "weights",
        )


def _probe(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor whose bytes are found nowhere else."""
    return torch.tensor(list(os.urandom(16)), dtype=torch.uint8, device=device).view(dtype)


def _is_move_to_cpu(before: Tensor, after: Tensor) -> bool:
    """Whether a tensor of the CPU was moved to `cpu:0`, which is where it is: torch copies it all the same."""
    if (before.dtype, before.device) != (after.dtype, after.device) or before.device.type != "cpu":
        return False
    return not after.is_shared() and torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def _refuse_change(before: Tensor, after: Tensor) -> NoReturn:
    if (before.dtype, before.device) == (after.dtype, after.device):
        what = "other memory"
    else:
        what = f"{_words(after)} in place of {_words(before)}"
    raise ModelError(
        f"engine: its parameters would get {what}, and lie in memory that the engine has given them",
        hint="choose dtype and device before dsrun.initialize, by the config and the job; to move states to the host "
        "for a while there is engine.offload_states",
    )


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
