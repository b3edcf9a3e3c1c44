"""What a table of causes consists of: a pattern of what programs print, and what it means. Knows no text itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """What is known of a failure.

    Attributes:
        words: description of what happened; empty where only the hint is known.
        hint: a way out; None where the words say it.
        follows: another rank's failure is behind it. See [Note: followers] in `recognise.py`.
        timed_out: torch waited for another rank in vain, and does not say for which, nor in what.
    """

    words: str
    hint: str | None = None
    follows: bool = False
    timed_out: bool = False


#: A regular expression of what is printed, and its cause; a function makes it of what the text itself names.
Rule = tuple[str, Cause | Callable[[re.Match[str]], Cause]]


def cause_by(rules: tuple[Rule, ...], text: str) -> Cause | None:
    """Returns the cause of the first rule that a text meets anywhere in it; None if it meets none."""
    for pattern, cause in rules:
        if found := re.search(pattern, text, re.MULTILINE):
            return cause if isinstance(cause, Cause) else cause(found)
    return None
