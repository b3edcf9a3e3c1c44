"""Values are rounded and widened without torch, and come out with torch's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsrun.checkpoint_files.tensors.rounding import convert, to_bf16

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def data_of(values: Tensor) -> memoryview:
    return memoryview(bytes(values.contiguous().view(torch.uint8).numpy()))


def values_of(data: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def all_kinds(count: int) -> Tensor:
    """fp32 values of every bit pattern there may be, and the edges that rounding has."""
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    edges = [
        sign | high << 16 | low
        for sign in (0, 1 << 31)
        for high in (0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)
        for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    ]
    bits = torch.cat([patterns, torch.tensor(edges, dtype=torch.int64)]) & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def test_bf16_has_torchs_bits_for_every_kind_of_value() -> None:
    values = all_kinds(300_001)
    mine, torchs = values_of(to_bf16(data_of(values)), torch.bfloat16), values.bfloat16()
    strange = values.isnan()
    assert torch.equal(mine[~strange].view(torch.int16), torchs[~strange].view(torch.int16))
    # torch's own choice among the not-numbers depends on the processor.
    assert strange.any()
    assert set(mine[strange].view(torch.int16).tolist()) == {0x7FC0}


@pytest.mark.parametrize("count", [1, 2, 16383, 16384, 16385])
def test_any_number_of_values_is_rounded(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(2))
    assert to_bf16(data_of(values)) == bytes(data_of(values.bfloat16()))


@pytest.mark.parametrize("source", list(DTYPES))
@pytest.mark.parametrize("target", ["F32", "BF16"])
def test_floats_are_converted_as_torch_does(source: str, target: str) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, 1.00390625, -3.140625, 6e-8, 65504.0, float("inf"), -0.1]).to(DTYPES[source])
    found = values_of(convert(data_of(values), source, target), DTYPES[target])
    expected = values.float().to(DTYPES[target])
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_what_is_no_float_stays() -> None:
    data = data_of(torch.tensor([1, 2, 3]))
    assert convert(data, "I64", "BF16") is data
    assert to_bf16(b"") == b""
