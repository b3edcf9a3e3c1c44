"""Adam and AdamW in one compiled loop, where someone has built it (`build_pass`): the same bits in less time.

Before it is used, its bits are compared with torch's kernel, which differs between processors and versions of torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import DsrunError

from ...optim.states.places import adam_state_names
from ..states.range_work import BlockStep, RangeWork
from .lanes import Lanes
from .torch_adam import AdamBlocks, count_step, ready_states

#: Without a vector's tail torch's kernel rounds the same everywhere.
_VECTOR = 64
_PROOF_NUMEL, _PROOF_STEPS = 1 << 12, 3

_Call = Callable[..., None]


class AdamPass(ctypes.Structure):
    """The numbers of one step, as `adam_pass.cpp` has them."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "scale",
            "sign",
            "mean_share",
            "square_decay",
            "square_share",
            "root_of_bias",
            "eps",
            "negative_rate",
            "weights_kept",
            "decay",
        )
    ]


class CompiledAdam:
    """Steps ranges by the compiled pass; those it has no loop for, as `AdamBlocks` does.

    Args:
        call: compiled function that `load_pass` returns.
        otherwise: object that steps what the pass has no loop for: fp16, states of 16 or 8 bits, split masters, steps
            out of place and ranges with a vector's tail.
        threads: number of threads that share a range; None for as many as torch's operations use; see `Lanes`.
    """

    def __init__(self, call: _Call, otherwise: BlockStep, *, threads: int | None) -> None:
        self._call = call
        self._otherwise = otherwise
        self._lanes = Lanes(threads)

    @torch.no_grad()
    def step(self, work: RangeWork) -> None:
        """Updates one range; see `BlockStep`."""
        if not _has_loop(work):
            self._otherwise.step(work)
            return
        numbers = _numbers(work.options, float(count_step(work)), work.grad_scale)
        means, squares, *largest = ready_states(work)
        assert isinstance(work.master_N, Tensor), "there is no loop for halves"
        pointers = [work.master_N, work.grads_N, means, squares, *(largest or [None]), work.params_out_N]

        def share(lane: int, first: int, last: int) -> None:
            at = [None if t is None else t.data_ptr() + first * t.element_size() for t in pointers]
            self._call(ctypes.byref(numbers), last - first, work.grads_N.dtype == torch.bfloat16, *at)

        self._lanes.divide(work.numel, share)


def load_pass(path: Path) -> _Call:
    """Returns the compiled pass of a library, once its bits have been compared with torch's.

    Args:
        path: path of the library that `build_pass` has built.

    Raises:
        DsrunError: it cannot be loaded, or has other bits than torch's fused kernel here.
    """
    try:
        call: Any = ctypes.CDLL(str(path)).dsrun_adam_pass
    except (OSError, AttributeError) as error:
        raise DsrunError(
            f"{path}: {error}", hint="build it anew: python -m dsrun.runtime.offload.step.build_pass"
        ) from error
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, *[ctypes.c_void_p] * 6]
    call.restype = None
    wrong = _first_difference(call)
    if wrong is not None:
        raise DsrunError(
            f"{path}: gives other bits than torch {torch.__version__}'s fused kernel ({wrong})",
            hint="leave it out: python -m dsrun.runtime.offload.step.build_pass --remove",
        )
    return call


def _has_loop(work: RangeWork) -> bool:
    states = [work.states[name] for name in adam_state_names(work.options) if name in work.states]
    return work.form.name == "fp32" and (
        isinstance(work.master_N, Tensor)
        and work.master_N.dtype == torch.float32
        and work.grads_N.dtype in (torch.float32, torch.bfloat16)
        and all(state.dtype == torch.float32 for state in states)
        and (work.params_out_N is None or work.params_out_N.dtype == torch.bfloat16)
        and work.numel % _VECTOR == 0
        and not work.origins  # copied block by block, which the loop does not do
    )


def _numbers(options: Mapping[str, Any], count: float, grad_scale: float) -> AdamPass:
    """Returns the numbers of a step, computed in double precision and rounded once, as torch's kernel does."""
    beta1, beta2 = (float(beta) for beta in options["betas"])
    lr, decay = float(options["lr"]), float(options["weight_decay"])
    is_apart = bool(options["decoupled_weight_decay"])
    return AdamPass(
        grad_scale,
        -1.0 if options["maximize"] else 1.0,
        1 - beta1,
        beta2,
        1 - beta2,
        sqrt(1 - beta2**count),
        options["eps"],
        -(lr / (1 - beta1**count)),
        1 - lr * decay if is_apart else 1.0,
        0.0 if is_apart else decay,
    )


def _first_difference(call: _Call) -> str | None:
    """Returns the first options for which the pass and torch's kernel differ in a bit."""
    draw = torch.Generator().manual_seed(0)
    for decoupled, amsgrad, maximize, bf16 in product((False, True), repeat=4):
        options: Mapping[str, Any] = {
            "lr": 1e-2,
            # The mean's share is on either side of a half.
            "betas": (0.4, 0.95) if maximize else (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled,
            "fused": True,
            "capturable": False,
        }
        start = torch.randn(_PROOF_NUMEL, generator=draw)
        grads = [
            # Over many orders of magnitude, as gradients are.
            torch.randn(_PROOF_NUMEL, generator=draw) * torch.logspace(-12, 3, _PROOF_NUMEL)
            for _ in range(_PROOF_STEPS)
        ]
        torch_s = AdamBlocks(_PROOF_NUMEL, threads=1)
        results = [
            _after(stepper, start, [g.bfloat16() for g in grads] if bf16 else grads, options)
            for stepper in (CompiledAdam(call, torch_s, threads=1), torch_s)
        ]
        for name, ours in results[0].items():
            if not torch.equal(ours, results[1][name]):
                named = ", ".join(f"{key} {options[key]}" for key in ("decoupled_weight_decay", "amsgrad", "maximize"))
                return f"{name}; {named}, {'bf16' if bf16 else 'fp32'} gradients"
    return None


def _after(stepper: BlockStep, start: Tensor, grads: Sequence[Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns all that a stepper has written after a few steps."""
    master, out = start.clone(), torch.empty_like(start, dtype=torch.bfloat16)
    states: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for grad in grads:
        stepper.step(RangeWork(master, grad, states, scalars, options, 0.37, out))
    return {"weights": master, "bf16 parameters": out, **states}
