"""Bytes, counts and durations as people read them. No parsing of configs, no arithmetic beyond the unit."""

from __future__ import annotations

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
