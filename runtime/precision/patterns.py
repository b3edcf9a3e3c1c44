"""Patterns by which a config names modules or tensors of a model. What becomes of them, others decide."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from dsrun.errors import ModelError

_SHOWN = 3


def match_names(patterns: Sequence[str], names: Collection[str], *, key: str, noun: str) -> set[str]:
    """Returns the names that a pattern matches: anywhere in the name, `*` standing for any characters.

    Args:
        patterns: patterns from the config, matched by the rule of transformers' lists of modules.
        names: qualified names, of modules or tensors.
        key: key of the config, for the error.
        noun: noun for the named things, such as `linear layer`, for the error.

    Raises:
        ModelError: a pattern matches no name; with names that are close.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if matches(pattern, name)}
        if not matched:
            close = get_close_matches(pattern, [part for name in names for part in (name, *name.split("."))], _SHOWN)
            shown = ", ".join(f"`{name}`" for name in dict.fromkeys(close or sorted(names)[:_SHOWN]))
            raise ModelError(
                f"`{key}` has {pattern!r}, which matches the name of no {noun} of the model",
                hint=f"there is {shown}; `*` stands for any characters" if shown else f"the model has no {noun}",
            )
        found |= matched
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern stands anywhere in a name, `*` for any characters."""
    return re.search(".*".join(map(re.escape, pattern.split("*"))), name) is not None
