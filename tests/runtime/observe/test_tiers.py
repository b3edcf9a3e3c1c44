"""What the system and malloc tell of this process."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.observe.tiers import live_bytes_of, malloc_bytes, read_tiers

MIB = 1 << 20


def test_the_host_is_told_with_what_is_known_of_it() -> None:
    (use,) = read_tiers(torch.device("cpu"), kinds=(("parameters", 5),))
    assert (use.tier, use.kinds) == ("cpu", (("parameters", 5),))
    assert 50 * MIB < use.held_bytes <= use.peak_bytes


def test_malloc_tells_of_a_tensor_to_the_page_and_of_its_end() -> None:
    before = malloc_bytes()
    if before is None:
        pytest.skip("this C library does not tell")
    held = torch.empty(64 * MIB, dtype=torch.uint8)
    (use,) = read_tiers(torch.device("cpu"))
    assert use.reserved_bytes is not None
    assert 64 * MIB <= live_bytes_of(use) - before[0] < 65 * MIB
    assert use.reserved_bytes >= live_bytes_of(use)
    del held
    after = malloc_bytes()
    assert after is not None
    assert abs(after[0] - before[0]) < MIB
