"""Bytes, counts, durations and lists as people read and write them. No arithmetic beyond the unit."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "K", "M", "B", "T")


def format_bytes(count: float) -> str:
    """`1536` -> `1.5 KiB`. Binary units, at most one decimal."""
    value = float(count)
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_BINARY[-1]}"


def format_count(count: float) -> str:
    """`7_000_000_000` -> `7B`, `3_420_000` -> `3.42M`. Decimal units, three significant digits."""
    value = float(count)
    for unit in _DECIMAL[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}{_DECIMAL[-1]}"


def format_duration(seconds: float) -> str:
    """`3725` -> `1h 2m 5s`, `0.0123` -> `12.3 ms`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m {rest}s" if hours else f"{minutes}m {rest}s"


def format_list(texts: Sequence[str], most: int) -> str:
    """Four texts, two at most -> `a, b and 2 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def format_names(names: Sequence[str], most: int) -> str:
    """Four names, two at most -> `a`, `b` and 2 more, each between back-ticks."""
    return format_list([f"`{name}`" for name in names], most)


def parse_bytes(text: str) -> int | None:
    """`5GB` -> 5_000_000_000, decimal as Hugging Face's are; `5GiB` is binary. None where it is no size above zero."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?) ?([KMGT]?)(i?)B", text, re.IGNORECASE)
    if match is None:
        return None
    base = 1024 if match.group(3) else 1000
    return int(float(match.group(1)) * base ** " KMGT".index(match.group(2).upper() or " ")) or None
