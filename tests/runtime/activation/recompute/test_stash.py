"""What a call saves, kept elsewhere: large tensors once, the others where they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsrun.runtime.activation.keep.host_ring import HostRing
from dsrun.runtime.activation.keep.keeper import AsItIs, Keeper
from dsrun.runtime.activation.recompute.stash import Stash
from dsrun.runtime.memory.bus import Bus, InstantBus
from dsrun.runtime.memory.host_pool import HostPool, host_pool_for
from support.slow_lanes import late_bus

LARGE = 4096  # elements of fp32: 16 KiB, the smallest that is moved


def run(keeper: Keeper, x: Tensor, weight: Tensor) -> Tensor:
    stash = Stash(keeper)
    with stash.begin():
        y = (x * weight).exp() + x * x  # saves weight, x three times, and an output of its own
    stash.end()
    return y.sum()


def gradient(keeper: Keeper | None, numel: int) -> Tensor:
    x = torch.linspace(-1, 1, numel).requires_grad_()
    weight = nn.Parameter(torch.linspace(0, 1, numel))
    loss = ((x * weight).exp() + x * x).sum() if keeper is None else run(keeper, x, weight)
    (found,) = torch.autograd.grad(loss, x)
    return found


def test_a_tensor_that_is_saved_three_times_is_kept_once_and_parameters_not_at_all() -> None:
    keeper = AsItIs()
    x = torch.linspace(-1, 1, LARGE).requires_grad_()
    loss = run(keeper, x, nn.Parameter(torch.ones(LARGE)))
    assert keeper.device_bytes == 2 * LARGE * 4  # x and the result of exp
    loss.backward()
    del loss
    assert keeper.device_bytes == 0


def test_small_tensors_stay_where_they_are() -> None:
    keeper = AsItIs()
    loss = run(keeper, torch.linspace(-1, 1, LARGE - 1).requires_grad_(), nn.Parameter(torch.ones(LARGE - 1)))
    assert keeper.device_bytes == 0
    loss.backward()


def test_gradients_are_those_of_plain_autograd_through_the_host() -> None:
    bus = InstantBus()
    found = gradient(HostRing(torch.device("cpu"), bus, pool=HostPool(None, say=print)), LARGE)
    assert torch.equal(found, gradient(None, LARGE))
    assert bus.counts.out["activations"].calls == 2


def test_a_graph_may_be_gone_through_twice() -> None:
    x = torch.linspace(-1, 1, LARGE).requires_grad_()
    loss = run(AsItIs(), x, nn.Parameter(torch.ones(LARGE)))
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


def test_what_is_saved_and_then_changed_in_place_comes_back_as_it_was_saved(device: torch.device) -> None:
    def gradients(bus: Bus) -> list[Tensor]:
        ring = HostRing(device, bus, pool=host_pool_for(device, pin=True, say=print))
        found: list[Tensor] = []
        for step in range(3):
            x = torch.linspace(-1 - step, 1, LARGE, device=device).requires_grad_()
            stash = Stash(ring, label="blocks.0")
            with stash.begin():
                y = x.exp()  # saves its result
                loss = (y * y).sum()  # and that again
                y.detach().zero_()  # which the hooks of a stash keep autograd from noticing
            stash.end()
            loss.backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    plain = torch.linspace(-1, 1, LARGE, device=device).requires_grad_()
    plain.exp().square().sum().backward()
    found = gradients(late_bus(device))
    assert plain.grad is not None
    assert torch.allclose(found[0], plain.grad)
    if device.type == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(InstantBus()), strict=True))
