"""A checked config with every value and its source: rows for people, and a document that loads as the same config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsrun.config.batch import MICRO_KEY, STEPS_KEY, TRAIN_KEY
from dsrun.config.config import Config
from dsrun.config.knob import Section, Status
from dsrun.config.provenance import Kind, Source
from dsrun.config.text.tree import join


@dataclass(frozen=True, slots=True)
class Row:
    """One value of a resolved config.

    Attributes:
        path: dotted path.
        value: value in its JSON form.
        source: origin of the value.
        differs: difference between DeepSpeed's default and this one, for a value that is a default; None where nothing
            is to be said.
    """

    path: str
    value: Any
    source: Source
    differs: str | None


def rows(config: Config, *, diff_defaults: bool = False) -> list[Row]:
    """Returns the values that matter: those somebody set, and defaults of keys that work.

    Args:
        config: a checked config.
        diff_defaults: whether to leave out values that are equal to the default.
    """
    return [row for row, is_default in _walk(config, config, "") if not (diff_defaults and is_default)]


def document(config: Config, *, diff_defaults: bool = False) -> dict[str, Any]:
    """Returns the same values as one object; loading it gives the same values again.

    Args:
        config: a checked config.
        diff_defaults: whether to leave out values that are equal to the default.
    """
    root: dict[str, Any] = {}
    for row in rows(config, diff_defaults=diff_defaults):
        *sections, name = row.path.split(".")
        place = root
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = row.value
    return root


def _walk(config: Config, section: Section, path: str) -> Iterator[tuple[Row, bool]]:
    model = type(section)
    is_off = section.switch is not None and getattr(section, section.switch[0]) == section.switch[1]
    for name, info in model.model_fields.items():
        full, value = join(path, name), getattr(section, name)
        if isinstance(value, Section):
            yield from _walk(config, value, full)
            continue
        source = config.provenance[full]
        value, source = _batch_value(config, full, value, source)
        if value is None or (is_off and source.kind is Kind.DEFAULT and model.switch and name != model.switch[0]):
            continue
        if source.kind is Kind.DEFAULT and model.status_of(name) is not Status.WORKS:
            continue
        default: Any = None if info.is_required() else info.get_default(call_default_factory=True)
        differs = model.knob_of(name).differs if source.kind is Kind.DEFAULT else None
        plain: Any = [_plain(item) for item in value] if isinstance(value, tuple) else value
        yield Row(full, plain, source, differs), value == default and not info.is_required()


def _plain(item: Any) -> Any:
    """Returns an item of a list as JSON has it."""
    return item.model_dump(mode="json", exclude_defaults=True) if isinstance(item, Section) else item


def _batch_value(config: Config, path: str, value: Any, source: Source) -> tuple[Any, Source]:
    """Batch sizes that follow from the others are shown once the number of ranks is known."""
    if config.batch is None or value is not None:
        return value, source
    sizes = config.batch
    solved = {TRAIN_KEY: sizes.train_batch_size, MICRO_KEY: sizes.micro_batch, STEPS_KEY: sizes.accumulation_steps}
    if path not in solved:
        return value, source
    return solved[path], Source(Kind.DERIVED, None, "from the other batch sizes and the number of ranks")
