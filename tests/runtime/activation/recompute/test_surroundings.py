"""What a call ran in is there again for its second run, and only for that."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsrun.runtime.activation.recompute.rng import RngTracker
from dsrun.runtime.activation.recompute.surroundings import Surroundings
from dsrun.runtime.compat import AttentionChoice


def note(*, preserve_rng: bool = True, tracker: RngTracker | None = None) -> Surroundings:
    return Surroundings([torch.zeros(2, device="cpu")], tracker or RngTracker(), preserve_rng=preserve_rng)


def test_the_same_numbers_are_drawn_again_and_what_comes_after_is_not_moved() -> None:
    torch.manual_seed(3)
    then = note()
    first, second = torch.rand(4), torch.rand(4)
    with then.again():
        assert torch.equal(torch.rand(4), first)
        assert torch.equal(torch.rand(4), second)
    torch.manual_seed(3)
    torch.rand(8)
    expected = torch.rand(4)
    torch.manual_seed(3)
    torch.rand(8)
    with then.again():
        torch.rand(100)
    assert torch.equal(torch.rand(4), expected)


def test_without_randomness_a_second_run_draws_on() -> None:
    torch.manual_seed(3)
    then = note(preserve_rng=False)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    with then.again():
        assert torch.equal(torch.rand(4), expected)


def test_named_generators_are_replayed_too() -> None:
    tracker = RngTracker()
    tracker.add("mine", 7)
    then = note(tracker=tracker)
    with tracker.fork("mine"):
        first = torch.rand(3)
    with then.again(), tracker.fork("mine"):
        assert torch.equal(torch.rand(3), first)


def test_the_autocast_of_the_first_run_is_on_in_the_second_and_off_behind_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        then = note()
    weight = torch.ones(2, 2)
    with then.again():
        assert (weight @ weight).dtype == torch.bfloat16
    assert (weight @ weight).dtype == torch.float32


def test_an_autocast_that_came_later_is_not_that_of_the_call() -> None:
    then = note()
    weight = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with then.again():
            assert (weight @ weight).dtype == torch.float32
        assert (weight @ weight).dtype == torch.bfloat16


def test_tensors_without_a_device_come_to_the_device_of_then() -> None:
    with torch.device("meta"):
        then = note()
    with then.again():
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == "cpu"


def test_attention_chooses_among_the_kernels_of_then_in_their_order() -> None:
    chosen = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    before = AttentionChoice.now().kernels()
    with sdpa_kernel(chosen, set_priority=True):
        then = note()
        then.settle()
    with then.again():
        assert AttentionChoice.now().kernels() == chosen
        assert torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert AttentionChoice.now().kernels() == before


def test_an_order_that_torch_settles_in_the_first_run_is_that_of_the_second() -> None:
    settled = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(settled[::-1], set_priority=True):
        then = note()
        with sdpa_kernel(settled, set_priority=True):  # as a GPU's first attention does, for good
            then.settle()
            with then.again():
                assert AttentionChoice.now().kernels() == settled
    unsettled = note()
    with sdpa_kernel(settled, set_priority=True), unsettled.again():
        assert AttentionChoice.now().kernels()[:1] == settled[:1]
        assert set(AttentionChoice.now().kernels()) > set(settled)


def test_kernels_that_were_chosen_later_are_not_those_of_the_call() -> None:
    before = AttentionChoice.now().kernels()
    then = note()
    with sdpa_kernel(SDPBackend.MATH):
        with then.again():
            assert AttentionChoice.now().kernels() == before
        assert AttentionChoice.now().kernels() == [SDPBackend.MATH]


def test_all_is_put_back_where_the_second_run_fails() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        then = note()
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)

    def run() -> None:
        with then.again():
            torch.rand(9)
            raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        run()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.rand(2), expected)
