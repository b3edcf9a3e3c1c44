"""A recomputed call of any function, as a script makes it; blocks of a model are called by `blocks.py` instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from .call import RecomputedCall, present_call, running
from .options import CallOptions


def call_recomputed(
    name: str,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    options: CallOptions,
) -> Any:
    """Makes a call that is run again in backward; see call.[Note: recomputed calls].

    Where no gradients are asked for, and inside of another such call, it is an ordinary call. While a compiler traces,
    it is torch's own checkpoint, which the compiler knows.
    """
    if torch.compiler.is_compiling():
        return torch_checkpoint.checkpoint(run, *args, use_reentrant=False, **kwargs)
    if not torch.is_grad_enabled() or present_call() is not None:
        return run(*args, **kwargs)
    call = RecomputedCall(name, _Surrounded(run), args, kwargs, options=options)
    with running(call), call.begin():
        output = call.run(*args, **kwargs)
    call.end(output)
    return output


class _Surrounded:
    """A function in the surroundings of the present call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = present_call()
        assert call is not None, "called by its call only"
        with call.surroundings():
            return self._run(*args, **kwargs)
