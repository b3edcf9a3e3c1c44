"""A copy of a module has no part in what the hooks of the original do, and room for hooks of its own."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.runtime.own_hooks import OwnHook


def unpickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def copy_of_a_copy(module: nn.Module) -> nn.Module:
    return unpickled(copy.deepcopy(module))


def hooked(calls: list[str]) -> nn.Linear:
    """A module with both kinds of hooks; each notes its call, and the one behind the forward doubles the output."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append("before")

    def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        calls.append("after")
        return 2 * output

    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(OwnHook(before), with_kwargs=True)
    module.register_forward_hook(OwnHook(after), with_kwargs=True, always_call=True)
    return module


def test_a_hook_runs_on_its_own_module() -> None:
    calls: list[str] = []
    module, x = hooked(calls), torch.ones(1, 2)
    assert torch.equal(module(x), 2 * nn.functional.linear(x, module.weight, module.bias))
    assert calls == ["before", "after"]


def test_a_shallow_copy_shares_parameters_and_hooks() -> None:
    calls: list[str] = []
    copy.copy(hooked(calls))(torch.ones(1, 2))
    assert calls == ["before", "after"]


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled, copy_of_a_copy])
def test_a_copy_leaves_hooks_behind(copied: Callable[[nn.Module], nn.Module]) -> None:
    calls: list[str] = []
    module, x = hooked(calls), torch.ones(1, 2)
    twin = copied(module)
    assert torch.equal(twin(x), nn.functional.linear(x, module.weight, module.bias))
    assert not calls
    twin.register_forward_pre_hook(lambda module, args: calls.append("its own"))
    twin(x)
    assert calls == ["its own"]


def test_hooks_of_an_unpickled_module_do_not_take_the_numbers_of_those_left_behind() -> None:
    """The process that unpickles it counts from 0; torch keeps by number whether a hook takes keywords."""
    script = (
        "import pickle, sys, torch\n"
        "module = pickle.load(sys.stdin.buffer)\n"
        "calls = []\n"
        "count = max(module._forward_hooks) + 2\n"
        "for _ in range(count): module.register_forward_hook(lambda module, args, output: calls.append(len(args)))\n"
        "module(torch.ones(1, 2))\n"
        "print(calls == [1] * count)\n"
    )
    data = pickle.dumps(hooked([]))
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, timeout=100, check=True)
    assert done.stdout.strip() == b"True"
