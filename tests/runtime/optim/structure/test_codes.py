"""8-bit codes are bitsandbytes' table, and every value gets the nearest of them."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.optim.structure.codes import BLOCK, dynamic_table, dynamic_values

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_has_256_values_finer_towards_zero(signed: bool) -> None:
    values = dynamic_values(signed=signed)
    assert len(values.unique()) == len(values) == 256
    assert (float(values[0]), float(values[-1])) == (pytest.approx(-0.99297, abs=1e-5) if signed else 0.0, 1.0)
    gaps = values[values >= 0].diff()
    assert bool((gaps[3:-1].diff() > -0.006).all())
    smallest = float(values[values > 0][0])
    assert smallest == pytest.approx(5.5e-7 if signed else 3.25e-7, rel=1e-4)


@pytest.mark.parametrize("signed", [True, False])
def test_every_value_gets_the_nearest_code(signed: bool) -> None:
    table = dynamic_table(signed=signed, device=CPU)
    middle = (table.values[:-1] + table.values[1:]) / 2
    around = torch.cat([middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1), table.values])
    spread = torch.logspace(-9, 0, 4001)
    values = torch.cat([around, spread, -spread] if signed else [around, spread]).clamp(-1.0 if signed else 0.0, 1.0)
    values = torch.cat([values, values.new_zeros(-len(values) % BLOCK)]).view(-1, BLOCK)
    values[:, 0] = 1.0  # the scale of each block
    codes, scales = torch.empty(values.shape, dtype=torch.uint8), torch.empty(len(values))
    table.encode(values.clone(), codes, scales)
    assert scales.tolist() == [1.0] * len(scales)
    decoded = table.decode(codes, scales)
    nearest = (values.unsqueeze(-1) - table.values).abs().amin(dim=-1)
    kept_sign = (values < 0) & (values > -6e-7)  # negative values never become zero
    torch.testing.assert_close((values - decoded).abs()[~kept_sign], nearest[~kept_sign], rtol=0, atol=1e-7)
    assert bool((decoded[values < 0] < 0).all())
    assert bool((decoded[values == 0] == 0).all())


def test_blocks_of_zeros_stay_zero() -> None:
    table = dynamic_table(signed=True, device=CPU)
    codes, scales = torch.empty(2, BLOCK, dtype=torch.uint8), torch.empty(2)
    table.encode(torch.zeros(2, BLOCK), codes, scales)
    assert bool((codes == table.zero).all())
    assert not bool(table.decode(codes, scales).any())


@pytest.mark.parametrize("signed", [True, False])
def test_coding_what_was_decoded_changes_nothing(signed: bool) -> None:
    table = dynamic_table(signed=signed, device=CPU)
    values = torch.randn(8, BLOCK, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.square()
    codes, scales = torch.empty(8, BLOCK, dtype=torch.uint8), torch.empty(8)
    table.encode(values.clone(), codes, scales)
    again, scales_again = torch.empty_like(codes), torch.empty(8)
    table.encode(table.decode(codes, scales), again, scales_again)
    if not signed:  # the largest is coded as 1, which stands for itself; -1 is in no signed table
        assert torch.equal(scales_again, scales)
        assert torch.equal(again, codes)
    torch.testing.assert_close(table.decode(again, scales_again), table.decode(codes, scales), rtol=0.02, atol=1e-7)
