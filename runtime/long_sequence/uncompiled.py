"""A decorator for functions that `torch.compile` calls as they are: they go through autograd themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def uncompiled(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Returns the function, into which no compiler looks: the graph around a call of it is in two parts."""
    disabled: Any = torch.compiler.disable(function)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return disabled
