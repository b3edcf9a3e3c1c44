"""Calls that a script makes: recomputed where gradients are asked for, ordinary everywhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsrun.runtime.activation.keep.keeper import AsItIs
from dsrun.runtime.activation.recompute.call import present_call
from dsrun.runtime.activation.recompute.options import CallOptions
from dsrun.runtime.activation.recompute.rng import RngTracker
from dsrun.runtime.activation.recompute.script_calls import call_recomputed


class Counted:
    """A function that counts its runs."""

    def __init__(self, inner: Any = None) -> None:
        self.runs = 0
        self._inner = inner

    def __call__(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.runs += 1
        y = (x * scale).exp().sin()
        return y if self._inner is None else recompute(self._inner, y)


def recompute(run: Any, *args: Any, **kwargs: Any) -> Any:
    return call_recomputed("call", run, args, kwargs, options=CallOptions(AsItIs(), RngTracker()))


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 8).requires_grad_()


def test_a_call_runs_again_in_backward_with_the_gradient_of_an_ordinary_one() -> None:
    run, x, plain = Counted(), leaf(), leaf()
    output = recompute(run, x, scale=0.5)
    assert run.runs == 1
    assert present_call() is None
    output.sum().backward()
    Counted()(plain, scale=0.5).sum().backward()
    assert run.runs == 2
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


def test_without_gradients_it_is_an_ordinary_call() -> None:
    run = Counted()
    with torch.no_grad():
        output = recompute(run, leaf())
    assert (run.runs, output.requires_grad) == (1, False)


def test_inside_of_another_one_it_is_an_ordinary_call() -> None:
    inner = Counted()
    outer, x = Counted(inner), leaf()
    recompute(outer, x).sum().backward()
    # Once each in forward and once each in backward: the inner one has no third run of its own.
    assert (outer.runs, inner.runs) == (2, 2)


def test_a_call_that_fails_leaves_no_call_present() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("of the function")

    try:
        recompute(fail, leaf())
    except ValueError:
        assert present_call() is None
    else:
        raise AssertionError("the function's error was lost")


def test_a_compiler_sees_its_own_checkpoint() -> None:
    x, plain = leaf(), leaf()

    def run(given: Tensor) -> Tensor:
        return given.exp().sin()

    def call(given: Tensor) -> Tensor:
        return recompute(run, given)

    torch.compile(call, backend="eager", fullgraph=True)(x).sum().backward()
    run(plain).sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)
