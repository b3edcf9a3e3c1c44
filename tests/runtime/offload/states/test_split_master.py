"""A master in two halves is the parameter, and every bit it had."""

from __future__ import annotations

import torch
from torch import Tensor

from dsrun.runtime.offload.states.scratch import Scratch
from dsrun.runtime.offload.states.split_master import join_master, split_master


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int64).where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def test_every_upper_half_with_the_lower_halves_where_rounding_turns() -> None:
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = from_bits(upper + lower)
        halves = split_master(master)
        joined = join_master(halves)
        number = ~master.isnan()
        assert torch.equal(joined.view(torch.int32)[number], master.view(torch.int32)[number]), hex(lower)
        assert torch.equal(joined.isnan(), master.isnan()), hex(lower)
        assert torch.equal(halves.high_N[number], master[number].bfloat16()), hex(lower)


def test_ties_are_few_and_are_only_those_that_16_bits_do_not_hold() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F800000, 0xBF808000])
    halves = split_master(from_bits(bits))
    assert halves.ties.tolist() == [0, 3]
    assert halves.low_N.tolist() == [-32768, -32768, 0, -32768]


def test_a_part_is_written_and_read_by_itself() -> None:
    halves = split_master(torch.zeros(6))
    part = from_bits(torch.tensor([0x3F808000, 0x3F818001]))
    halves.split(2, part, Scratch())
    halves.settle()
    assert halves.ties.tolist() == [2]
    assert torch.equal(halves.join(2, 4, Scratch()), part)
    assert torch.equal(join_master(halves), torch.cat([torch.zeros(2), part, torch.zeros(2)]))
