"""Numbers that schedules are made of, checked before anything is written: all that are wrong, in one error.

A config's have been checked with their places in the file; these are for schedules that a script makes itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import optim

from dsrun.errors import ModelError, Problem


class NoOptimizerError(ModelError, TypeError):
    """What a schedule is given is no optimizer; a TypeError as well, as scripts expect."""


class ScheduleNumbers:
    """Collects what is wrong with the arguments of one schedule.

    Args:
        schedule: its name.
        optimizer: optimizer of the schedule; each of its groups may have numbers of its own.
    """

    def __init__(self, schedule: str, optimizer: optim.Optimizer) -> None:
        self._schedule = schedule
        self._group_count = len(optimizer.param_groups)
        self._problems: list[Problem] = []

    def real(self, name: str, value: Any, *, least: float = 0.0, most: float = math.inf) -> bool:
        """Whether `value` is a finite number from `least` to `most`; notes it where it is not."""
        is_right = _is_number(value) and math.isfinite(value) and least <= value <= most
        limit = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        return is_right or self.note(name, value, f"a number {limit}")

    def per_group(self, name: str, value: Any, *, least: float = 0.0, most: float = math.inf) -> bool:
        """Whether `value` is such a number, or a list of one for each group; notes it where it is not."""
        if not isinstance(value, list | tuple):
            return self.real(name, value, least=least, most=most)
        numbers = cast("Sequence[Any]", value)
        if len(numbers) != self._group_count:
            return self.note(name, value, f"one number, or {self._group_count}: one for each group of the optimizer")
        are_right = [self.real(f"{name}[{at}]", number, least=least, most=most) for at, number in enumerate(numbers)]
        return all(are_right)

    def count(self, name: str, value: Any, *, least: int) -> bool:
        """Whether `value` is a whole number of at least `least`; notes it where it is not."""
        is_right = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return is_right or self.note(name, value, f"a whole number of at least {least}")

    def one_of(self, name: str, value: Any, choices: Sequence[str]) -> bool:
        """Whether `value` is one of the words; notes it where it is not."""
        return value in choices or self.note(name, value, " or ".join(repr(choice) for choice in choices))

    def ordered(self, low_name: str, low: Sequence[float], high_name: str, high: Sequence[float]) -> bool:
        """Whether no number of `high` is below its fellow in `low`; notes the first that is."""
        wrong = next((pair for pair in zip(low, high, strict=True) if pair[1] < pair[0]), None)
        return wrong is None or self.note(high_name, wrong[1], f"at least `{low_name}`, {wrong[0]:g}")

    def note(self, name: str, value: Any, expected: str) -> bool:
        """Notes what is wrong; returns False."""
        self._problems.append(Problem(f"{self._schedule}: `{name}` is {value!r}; expected {expected}"))
        return False

    def refuse(self) -> None:
        """Refuses what was noted.

        Raises:
            ModelError: every argument that is wrong.
        """
        if self._problems:
            raise ModelError.of(self._problems)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
