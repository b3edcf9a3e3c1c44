"""Norms of gradients that leave before they are multiplied have the bits of norms of the products."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.memory.bus import bus_for
from dsrun.runtime.memory.host_pool import host_pool_for
from dsrun.runtime.mesh.sums import set_scaled
from dsrun.runtime.offload.host_gradients import HostGradients
from dsrun.runtime.optim.norm import block_norms

THIRD = 1 / 3
#: Numbers of blocks: fewer than a piece has, a piece, and pieces with a rest of every kind.
PIECE = (1 << 22) // 256
COUNTS = [1, 15, 16, 17, PIECE, PIECE + 1, PIECE + 3, PIECE + 15, PIECE + 16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_last_piece_of_any_length_has_the_bits_that_it_has_in_the_whole(
    device: torch.device, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    whole_N = torch.randn(256 * COUNTS[-1], generator=generator).to(device, dtype)
    products_N = torch.empty(whole_N.shape, dtype=torch.float32, device=device)
    set_scaled(products_N, whole_N, THIRD)
    expected = block_norms(products_N)
    bus = bus_for(device)
    gradients = HostGradients(
        [256 * count for count in COUNTS],
        bus=bus,
        device=device,
        travels=dtype,
        accumulates=False,
        factors=[THIRD],
        pool=host_pool_for(device, pin=True, say=pytest.fail),
        memory=Arenas(),
    )
    sent = [whole_N[: 256 * count].clone() for count in COUNTS]
    for index, grads_N in enumerate(sent):
        gradients.take(index, grads_N, THIRD, first=True)
    for norms, count in zip(gradients.norms(), COUNTS, strict=True):
        assert torch.equal(norms, expected[:count]), count
    bus.finish()
