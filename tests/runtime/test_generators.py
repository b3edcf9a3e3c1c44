"""States of the generators that every program has, back to the last bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from dsrun.runtime.generators import capture_host, host_kept, restore_host, seed_host


def draw() -> list[Any]:
    """Of each generator; normal numbers, of which numpy and Python keep the second one of a pair."""
    return [random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(())), random.random(), np.random.rand()]


def test_what_was_drawn_after_a_capture_is_drawn_again_after_it_is_restored() -> None:
    seed_host(5)
    draw()
    states = capture_host()
    expected = [draw() for _ in range(3)]
    seed_host(6)
    restore_host(states)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("seed", [0, 7, (1 << 64) - 1])
def test_a_seed_decides_all_of_them(seed: int) -> None:
    seed_host(seed)
    first = draw()
    draw()
    seed_host(seed)
    assert draw() == first


def test_nothing_drawn_inside_is_drawn_outside() -> None:
    seed_host(1)
    expected = draw()
    seed_host(1)
    with host_kept():
        seed_host(2)
        draw()
    assert draw() == expected
