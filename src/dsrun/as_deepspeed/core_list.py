"""Numbers of cores as text, by the rules of DeepSpeed's `utils.numa`: in order, and none twice.

dsrun's own options take them as the kernel writes them, see `launcher/number_ranges.py`. Imports no torch.
"""

from __future__ import annotations

from dsrun.errors import UsageError


def parse_range(rng: str) -> range:
    """Returns the numbers of `3` or `3-5`.

    Raises:
        UsageError: it is neither, or ends before it begins.
    """
    first, dash, last = rng.partition("-")
    try:
        numbers = range(int(first), int(last if dash else first) + 1)
    except ValueError as error:
        raise UsageError(f"range {rng!r}; expected a number, or two with a dash between them, like `3-5`") from error
    if not numbers:
        raise UsageError(f"range {rng!r} ends before it begins; expected the smaller number first")
    return numbers


def parse_range_list(range_str: str) -> list[int]:
    """Returns the numbers of `0,2-4,6`.

    Raises:
        UsageError: a part is no range, or does not begin behind the one before it.
    """
    numbers: list[int] = []
    for part in range_str.split(","):
        found = parse_range(part)
        if numbers and found[0] <= numbers[-1]:
            raise UsageError(
                f"ranges {range_str!r}: {part!r} does not begin after {numbers[-1]}; expected them in order"
            )
        numbers += found
    return numbers
