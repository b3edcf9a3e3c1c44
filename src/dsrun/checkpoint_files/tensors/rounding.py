"""Floating-point values from one format to another, on bytes: no torch and no numpy, and fast all the same.

[Note: lanes of one large integer]
Python adds, masks and shifts integers of any length at the speed of memory. So thousands of fp32 values are one integer
whose lanes of 32 bits are the values, and rounding all of them to bf16 is a few operations on it, as a processor's
vector unit would do them; what matters is that no lane carries into the next. 22 ns a value on one core of a server.
"""

from __future__ import annotations

import struct
from array import array
from functools import lru_cache

#: Values that are converted at a time: more would leave the processor's cache.
_LANES = 1 << 14
#: Formats of one value that this converts between.
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


def convert(data: memoryview, source: str, target: str) -> bytes | memoryview:
    """Returns values in another format.

    Args:
        data: whole values, little-endian.
        source: their format, as safetensors names it.
        target: "F32" or "BF16"; what is no floating-point value, or in this format already, stays as it is.
    """
    if source == target or source not in FLOATS:
        return data
    assert target in ("F32", "BF16"), f"nothing is converted to {target}"
    if source == "BF16":
        return _widen(data)
    wide = data if source == "F32" else _to_fp32(data, source)
    return wide if target == "F32" else to_bf16(wide)


def to_bf16(data: memoryview | bytes) -> bytes:
    """Rounds fp32 values to the nearest bf16, ties to even, as torch does; what is no number becomes 0x7FC0.

    Args:
        data: whole values, little-endian.
    """
    step = 4 * _LANES
    return b"".join(_round_lanes(data[first : first + step]) for first in range(0, len(data), step))


def _round_lanes(data: memoryview | bytes) -> bytes:
    """See [Note: lanes of one large integer]."""
    count = len(data) // 4
    ones = _ones(count)
    values = int.from_bytes(data, "little")
    # The top bit of a lane, where the value is no number: magnitudes beyond infinity's carry into it.
    strange = ((values & ones * 0x7FFFFFFF) + ones * 0x007FFFFF) & ones * 0x80000000
    if strange:
        mask = (strange >> 31) * 0xFFFFFFFF
        values = values & ~mask | mask & ones * 0x7FC00000
    rounded = values + ones * 0x7FFF + (values >> 16 & ones)
    return memoryview(rounded.to_bytes(4 * count, "little")).cast("H")[1::2].tobytes()


@lru_cache(maxsize=4)
def _ones(count: int) -> int:
    """Returns an integer with a 1 in each of its lanes."""
    return int.from_bytes(b"\1\0\0\0" * count, "little")


def _widen(data: memoryview) -> memoryview:
    """Returns bf16 values as fp32."""
    wide = bytearray(2 * len(data))
    wide[2::4] = data[0::2]
    wide[3::4] = data[1::2]
    return memoryview(wide)


def _to_fp32(data: memoryview, source: str) -> memoryview:
    letter, size = {"F16": ("e", 2), "F64": ("d", 8)}[source]
    values = array("f", struct.unpack(f"<{len(data) // size}{letter}", data))
    return memoryview(values).cast("B")
