"""Calls that run again: same gradients, what is kept of them, and what they refuse."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from dsrun.errors import ModelError
from dsrun.runtime.activation.choose.profile import Profile
from dsrun.runtime.activation.keep.keeper import AsItIs
from dsrun.runtime.activation.recompute.options import CallOptions
from dsrun.runtime.activation.recompute.rng import RngTracker
from dsrun.runtime.activation.recompute.script_calls import call_recomputed
from dsrun.runtime.activation.recompute.selective import contexts_for
from dsrun.runtime.activation.recompute.stash import Stash

WIDTH = 24


class Products(TorchDispatchMode):
    """Counts matrix products that are really made: those below the contexts of selective recomputation."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        self.runs += 1
        hidden = F.dropout(F.gelu(self.up(x)), 0.3)
        return x + self.down(hidden if mask is None else hidden * mask)


def options(**more: Any) -> CallOptions:
    return replace(CallOptions(AsItIs(), RngTracker()), **more)


def sample(seed: int = 0) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def make() -> Mlp:
    torch.manual_seed(3)
    return Mlp()


def gradients(run: Callable[[Mlp, Tensor], Tensor]) -> list[Tensor]:
    module, x = make(), sample()
    torch.manual_seed(5)
    run(module, x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(param.grad for param in module.parameters() if param.grad is not None)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_dropout_is_drawn_the_same_and_later_draws_are_not_disturbed() -> None:
    drawn: list[Tensor] = []

    def run(module: Mlp, x: Tensor, *, recompute: bool) -> Tensor:
        y = call_recomputed("mlp", module, (x,), {}, options=options()) if recompute else module(x)
        y.sum().backward()
        x.grad = None
        module.zero_grad()
        drawn.append(torch.rand(3))
        return call_recomputed("mlp", module, (x,), {}, options=options()) if recompute else module(x)

    expected = gradients(lambda module, x: run(module, x, recompute=False))
    assert_same(gradients(lambda module, x: run(module, x, recompute=True)), expected)
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("outside", ["forward", "backward"])
def test_attention_takes_the_kernel_of_the_first_run_in_the_second(device: torch.device, outside: str) -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # flash attention needs it there
    x = torch.randn(2, 4, 64, 32, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    one, two = [SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    first, second = (two, one) if outside == "forward" else (one, two)
    found: list[Tensor] = []
    for recompute in (False, True):
        with sdpa_kernel(first):
            y = call_recomputed("attend", attend, (x * 1,), {}, options=options()) if recompute else attend(x * 1)
        with sdpa_kernel(second):
            found += torch.autograd.grad(y.float().square().sum(), x)
    assert torch.allclose(found[0], found[1])


def test_without_the_state_of_generators_dropout_differs() -> None:
    expected = gradients(lambda module, x: module(x))
    loose = options(preserve_rng=False)
    found = gradients(lambda module, x: call_recomputed("mlp", module, (x,), {}, options=loose))
    assert not torch.equal(found[0], expected[0])


def test_arguments_may_be_nested_and_named() -> None:
    mask = torch.rand(4 * WIDTH)

    def body(parts: dict[str, list[Tensor]], module: Mlp, *, mask: Tensor) -> tuple[Tensor, str]:
        return module(parts["x"][0], mask=mask), "and a word"

    def run(module: Mlp, x: Tensor) -> Tensor:
        kept = options()
        output, word = call_recomputed("body", body, ({"x": [x]}, module), {"mask": mask}, options=kept)
        assert word == "and a word"
        assert kept.keeper.device_bytes == x.nbytes
        return output

    assert_same(gradients(run), gradients(lambda module, x: module(x, mask=mask)))


def test_the_last_product_is_not_made_twice_and_a_call_runs_twice() -> None:
    module = make()
    profile = Profile()
    y = call_recomputed("mlp", module, (sample(),), {}, options=options(observer=profile))
    assert module.runs == 1
    y.sum().backward()
    assert module.runs == 2
    figures = profile.figures["mlp"]
    assert figures.kept_bytes == 5 * WIDTH * 4
    # input, what dropout and GELU save, and what the second product reads: four times the width each
    assert figures.dropped_bytes >= 5 * WIDTH * 4 * (1 + 2 * 4)
    assert len(figures.seconds) == len(figures.again_s) == 1


def test_calls_wait_for_the_devices_of_their_tensors_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object = None) -> None:
        raise AssertionError(f"waited for {device}, and all is on the CPU")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", refuse)
    y = call_recomputed("mlp", make(), (sample(),), {}, options=options(observer=Profile(), synchronize=True))
    y.sum().backward()


@pytest.mark.cuda
def test_a_call_waits_for_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    x = sample().detach().cuda().requires_grad_()
    y = call_recomputed("mlp", make().cuda(), (x,), {}, options=options(synchronize=True))
    y.sum().backward()
    assert waited == [x.device] * 4


def test_a_graph_may_be_gone_through_twice() -> None:
    module, x = make(), sample()
    y = call_recomputed("mlp", module, (x,), {}, options=options()).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y, x)[0])


def test_gradients_of_gradients_are_those_of_plain_autograd() -> None:
    def twice(call: Callable[[Tensor], Tensor]) -> Tensor:
        x = sample()
        torch.manual_seed(5)
        (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        return second

    module = make()
    found = twice(lambda x: call_recomputed("mlp", module, (x,), {}, options=options()))
    assert torch.equal(found, twice(module))


def test_everything_goes_with_the_graph_without_the_garbage_collector() -> None:
    module, x, kept = make(), sample(), options()
    gc.disable()
    try:
        y = call_recomputed("mlp", module, (x * 1,), {}, options=kept)
        assert kept.keeper.device_bytes > 0
        y.sum().backward()
        assert kept.keeper.device_bytes == 0
        dropped = call_recomputed("mlp", module, (x * 1,), {}, options=kept)
        gone = weakref.ref(dropped)
        del dropped
        assert gone() is None
        assert kept.keeper.device_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("keeps", [True, False])
def test_no_tensor_of_either_run_outlives_the_backward(keeps: bool) -> None:
    made: list[weakref.ref[Tensor]] = []

    def body(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x * x).sigmoid().exp()  # nodes that save their own outputs
            made.append(weakref.ref(x))
        return x

    gc.disable()
    try:
        x = sample()
        if keeps:
            stash = Stash(AsItIs())
            with stash.begin():
                y = body(x).sum()
            stash.end()
        else:
            y = call_recomputed("body", body, (x,), {}, options=options()).sum()
        y.backward()
        del y
        assert len(made) == (3 if keeps else 5)  # the second run stops within the last operation
        assert [there() for there in made] == [None] * len(made)
    finally:
        gc.enable()


def test_without_gradients_and_inside_of_another_call_it_is_an_ordinary_call() -> None:
    module = make()
    kept = options()
    with torch.no_grad():
        call_recomputed("mlp", module, (sample(),), {}, options=kept)
    assert kept.keeper.device_bytes == 0

    def outer(x: Tensor) -> Tensor:
        return call_recomputed("inner", module, (x,), {}, options=kept)

    call_recomputed("outer", outer, (sample(),), {}, options=options()).sum().backward()
    assert module.runs == 3


def test_autocast_is_what_it_was() -> None:
    def run(module: Mlp, x: Tensor, *, recompute: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call_recomputed("mlp", module, (x,), {}, options=options()) if recompute else module(x)
        return y.float()

    expected = gradients(lambda module, x: run(module, x, recompute=False))
    assert_same(gradients(lambda module, x: run(module, x, recompute=True)), expected)


def test_results_of_chosen_operations_are_kept() -> None:
    expected = gradients(lambda module, x: module(x))

    def run(module: Mlp, x: Tensor) -> Tensor:
        return call_recomputed("mlp", module, (x,), {}, options=replace(options(), contexts=contexts_for()))

    assert_same(gradients(run), expected)
    module, x = make(), sample()
    with Products() as counting:
        run(module, x).sum().backward()
    assert counting.made == 2, "each product is made once"


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(ModelError, match="keep_operations` has 'matmull'"):
        contexts_for(["matmull"])


def test_a_call_that_goes_another_way_is_refused() -> None:
    class Fickle(Mlp):
        def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            return y.exp().exp() if self.runs == 1 else y

    with pytest.raises(ModelError, match=r"the second run of `fickle` saved \d tensors of \d: it went another way"):
        call_recomputed("fickle", Fickle(), (sample(),), {}, options=options()).sum().backward()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_cache_that_a_call_adds_to_is_named_with_the_way_out(by_name: bool) -> None:
    class GrowingCache:
        seen: Tensor | None = None

    class Attention(nn.Module):
        def forward(self, x: Tensor, cache: GrowingCache | None = None) -> Tensor:
            y = x.sin()
            if cache is not None:
                cache.seen = y if cache.seen is None else torch.cat([cache.seen, y])
                y = cache.seen
            return y.exp().exp()

    given: Any = ((sample(),), {"cache": GrowingCache()}) if by_name else ((sample(), GrowingCache()), {})
    with pytest.raises(ModelError, match="it went another way") as caught:
        call_recomputed("attention", Attention(), *given, options=options()).sum().backward()
    assert caught.value.hint is not None
    assert "a cache (GrowingCache)" in caught.value.hint
    assert "use_cache=False" in caught.value.hint
    call_recomputed("attention", Attention(), (sample(), None), {}, options=options()).sum().backward()


def test_an_input_that_changed_in_place_is_refused() -> None:
    x = sample() * 1
    y = call_recomputed("mlp", make(), (x,), {}, options=options())
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(ModelError, match="was changed in place"):
        y.sum().backward()


def test_a_backward_inside_of_a_call_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return grad

    with pytest.raises(ModelError, match="a backward runs inside the forward of `body`"):
        call_recomputed("body", body, (sample(),), {}, options=options())


def test_an_error_in_the_call_leaves_nothing_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        call_recomputed("fails", fails, (sample(),), {}, options=options())
    assert_same(
        gradients(lambda module, x: call_recomputed("mlp", module, (x,), {}, options=options())),
        gradients(lambda module, x: module(x)),
    )
