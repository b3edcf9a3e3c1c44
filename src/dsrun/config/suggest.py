"""What the user may have meant: close keys, keys in the wrong place, close values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from dsrun.config.knob import Section
from dsrun.config.text.tree import join

#: Longer text is no misspelt key, and comparing it takes long.
_LONGEST_KEY = 100


def suggest_key(key: str, model: type[Section], path: str, root: type[Section]) -> str | None:
    """A hint for a key that `model` does not have.

    Args:
        key: the key as written.
        model: the section it was written in.
        path: dotted path of that section.
        root: model of the whole config.

    Returns:
        A close key of the section, else the section the key belongs in, else a close key anywhere. Where only another
        type of the same section has the key (`optimizer.params` of another optimizer), the keys of this one.
    """
    if len(key) > _LONGEST_KEY:
        return None
    names = [*model.model_fields, *model.renamed]
    close = difflib.get_close_matches(key.strip().lower(), names, n=1, cutoff=0.8)
    if close:
        best = model.renamed.get(close[0], close[0])
        return f"did you mean `{join(path, best)}`?"
    places = dict.fromkeys(place for place, name in _all_keys(root, "") if name == key)
    if path in places:
        return f"with the `type` that is written, `{path}` has {', '.join(f'`{name}`' for name in model.model_fields)}"
    if 0 < len(places) <= 2:
        homes = [f"`{place}`" if place else "the top level" for place in places]
        return f"`{key}` belongs in {' or '.join(homes)}"
    close = difflib.get_close_matches(key.strip().lower(), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{join(path, model.renamed.get(close[0], close[0]))}`?"
    everywhere = {join(place, name): name for place, name in _all_keys(root, "")}
    near = difflib.get_close_matches(key, sorted(set(everywhere.values())), n=1, cutoff=0.85)
    if near:
        return f"did you mean `{next(full for full, name in everywhere.items() if name == near[0])}`?"
    return "keys that start with `_` are comments" if key.lower().startswith(("comment", "note", "desc")) else None


def suggest_value(value: Any, choices: tuple[Any, ...]) -> str | None:
    """A hint where text is close to one of the choices."""
    if not isinstance(value, str) or len(value) > _LONGEST_KEY:
        return None
    texts = {str(choice).lower(): choice for choice in choices if isinstance(choice, str)}
    close = difflib.get_close_matches(value.strip().lower(), texts, n=1, cutoff=0.7)
    return f'did you mean "{texts[close[0]]}"?' if close else None


def _all_keys(model: type[Section], path: str) -> Iterator[tuple[str, str]]:
    """Yields (path of the section, key) for every key of the schema."""
    for name, info in model.model_fields.items():
        yield path, name
        choices = model.knob_of(name).choices
        parts = (info.annotation, *get_args(info.annotation)) if choices is None else choices.models.values()
        for part in dict.fromkeys(parts):
            if isinstance(part, type) and issubclass(part, Section):
                yield from _all_keys(part, join(path, name))
