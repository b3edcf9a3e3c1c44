"""Types of single values: how text and floats become numbers, and how a message says what was expected."""

from __future__ import annotations

import math
import re
import types
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import annotated_types
from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

#: Of whole numbers: what 64 bits hold.
LARGEST = (1 << 63) - 1
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")


def number_of(value: Any) -> Any:
    """Reads numeric text (`"5e8"`, `"2"`); everything else comes back as it is."""
    if isinstance(value, str) and len(value) < 64 and _NUMBER.fullmatch(value.strip()):
        text = value.strip().replace("_", "")
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return value


def as_whole(value: Any) -> Any:
    """Turns integral floats and numeric text into int; a bool is no number."""
    if isinstance(value, bool):
        raise ValueError("a flag is no number")
    number = number_of(value)
    if isinstance(number, float) and math.isfinite(number) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and abs(number) > LARGEST:
        raise ValueError("outside 64 bits")
    return number


def as_real(value: Any) -> Any:
    """Turns ints and numeric text into float; a bool is no number."""
    if isinstance(value, bool):
        raise ValueError("a flag is no number")
    number = number_of(value)
    if isinstance(number, int):
        try:
            return float(number)
        except OverflowError as error:
            raise ValueError("too large") from error
    return number


def as_flag(value: Any) -> Any:
    """Turns `"true"`, `"False"`, 0 and 1 into bool."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    return value


def as_names(value: Any) -> Any:
    """Wraps one name in a tuple, and makes a list one."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def as_pair(value: Any) -> Any:
    """Makes a list a tuple, for types of fixed length."""
    return tuple(value) if isinstance(value, list) else value


Whole: TypeAlias = Annotated[int, BeforeValidator(as_whole)]
Count: TypeAlias = Annotated[int, BeforeValidator(as_whole), Field(ge=0)]
Positive: TypeAlias = Annotated[int, BeforeValidator(as_whole), Field(ge=1)]
Real: TypeAlias = Annotated[float, BeforeValidator(as_real), Field(allow_inf_nan=False)]
PositiveNumber: TypeAlias = Annotated[float, BeforeValidator(as_real), Field(gt=0, allow_inf_nan=False)]
#: What tensors are divided by: it and its reciprocal are ordinary fp32 numbers.
Divisor: TypeAlias = Annotated[float, BeforeValidator(as_real), Field(ge=1e-37, le=1e37, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, BeforeValidator(as_real), Field(ge=0, allow_inf_nan=False)]
NonPositive: TypeAlias = Annotated[float, BeforeValidator(as_real), Field(le=0, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, BeforeValidator(as_real), Field(ge=0, le=1, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, BeforeValidator(as_real), Field(gt=0, le=1, allow_inf_nan=False)]
#: A share that may wait for what is free when the engine is made.
FractionOrAuto: TypeAlias = Fraction | Literal["auto"]
BelowOne: TypeAlias = Annotated[float, BeforeValidator(as_real), Field(ge=0, lt=1, allow_inf_nan=False)]
Betas: TypeAlias = Annotated[tuple[BelowOne, BelowOne], BeforeValidator(as_pair)]
TwoNonNegative: TypeAlias = Annotated[tuple[NonNegative, NonNegative], BeforeValidator(as_pair)]
Flag: TypeAlias = Annotated[bool, BeforeValidator(as_flag)]
Counts: TypeAlias = Annotated[tuple[Count, ...], BeforeValidator(as_pair)]
Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(as_names)]
#: A size that may wait for the model: `"auto"` is kept until the hidden size is known.
CountOrAuto: TypeAlias = Annotated[int, BeforeValidator(as_whole), Field(ge=0)] | Literal["auto"]
PositiveOrAuto: TypeAlias = Annotated[int, BeforeValidator(as_whole), Field(ge=1)] | Literal["auto"]
Dtype: TypeAlias = Literal["fp32", "fp16", "bf16"]


def is_other_kind(written: Any, read: Any) -> bool:
    """Whether text was read as a number or a flag, or a number as a flag. 5e8 for a whole number is none of these."""
    if isinstance(read, bool):
        return not isinstance(written, bool)
    return isinstance(read, int | float) and isinstance(written, str)


def expectation(field: FieldInfo) -> str:
    """What a value of `field` must be, as a message says it: `0, 1, 2 or 3`, `a whole number of at least 1`."""
    return _expected(field.annotation, list(field.metadata))


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """All values of the `Literal`s in a type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in choices_of(part))


def alternatives(texts: list[str]) -> str:
    """`["0", "1", "2"]` -> `0, 1 or 2`."""
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _expected(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _expected(inner, [*metadata, *extra])
    if origin is Union or origin is types.UnionType:
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return alternatives([_expected(part, metadata if len(parts) == 1 else []) for part in parts])
    if origin is Literal:
        return alternatives([_literal(choice) for choice in get_args(annotation)])
    if origin is tuple:
        return _expected_tuple(get_args(annotation))
    if origin is dict:
        return "an object"
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return "a whole number" + _bounds(metadata)
    if annotation is float:
        return "a number" + _bounds(metadata)
    return "text" if annotation is str else "an object"


def _expected_tuple(parts: tuple[Any, ...]) -> str:
    if len(parts) == 2 and parts[1] is not Ellipsis:
        return f"a list of two, each {_expected(parts[0], [])}"
    return "a list of names" if parts[0] is str else f"a list, each {_expected(parts[0], [])}"


def _literal(choice: Any) -> str:
    if isinstance(choice, bool):
        return "true" if choice else "false"
    return f'"{choice}"' if isinstance(choice, str) else str(choice)


def _bounds(metadata: list[Any]) -> str:
    """Reads bounds out of pydantic's and annotated_types' markers."""
    flat: list[Any] = []
    for item in metadata:
        flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    texts: list[str] = []
    for item in flat:
        match item:
            case annotated_types.Ge(ge=bound):
                texts.append(f"of at least {bound}")
            case annotated_types.Gt(gt=bound):
                texts.append(f"above {bound}")
            case annotated_types.Le(le=bound):
                texts.append(f"at most {bound}")
            case annotated_types.Lt(lt=bound):
                texts.append(f"below {bound}")
            case _:
                pass
    return f" {' and '.join(texts)}" if texts else ""
