"""Numbers of a profile as text, in the units and with the digits that DeepSpeed's profiler writes."""

from __future__ import annotations

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_DIGITS = 2


def number_to_string(num: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns a number with its unit, `1.5 G`.

    Args:
        num: Number.
        units: Unit; None: the largest one that is not larger than the number.
        precision: Digits behind the point.
    """
    if units is None:
        fits = (unit for unit in _UNITS if num >= unit[0])
        size, units = next(fits, _UNITS[-1]) if num else (1.0, "")
    else:
        size = next((size for size, name in _UNITS if name == units), 1.0)
    return f"{round(num / size, precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns multiply-accumulates as text, `1.5 GMACs`; see `number_to_string`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns operations of a second as text, `1.5 GFLOPS`; see `number_to_string`."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns bytes as text, `1.5 GB`; see `number_to_string`."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns parameters as text, `1.5 B` for billions; see `number_to_string`."""
    unit = units.replace("B", "G") if units else units
    return number_to_string(params_num, unit, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns seconds as text, `1.5 ms`; see `number_to_string`."""
    return f"{number_to_string(duration, units, precision)}s"
