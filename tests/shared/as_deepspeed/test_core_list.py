"""Numbers of cores are read by DeepSpeed's rules: in order, none twice."""

from __future__ import annotations

import pytest

from dsrun.as_deepspeed.core_list import parse_range, parse_range_list
from dsrun.errors import UsageError


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0,2-4,6", [0, 2, 3, 4, 6]), ("7-7,9-10", [7, 9, 10]), ("12", [12])]
)
def test_numbers_are_read(text: str, numbers: list[int]) -> None:
    assert parse_range_list(text) == numbers


def test_a_range_is_one() -> None:
    assert parse_range("3-5") == range(3, 6)
    assert parse_range("4") == range(4, 5)


@pytest.mark.parametrize("text", ["", "a", "1-", "1-2-3", "4-2", "0,0", "3-5,5", "5,3", "0,,1", "1-x"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="range") as raised:
        parse_range_list(text)
    assert isinstance(raised.value, ValueError)
