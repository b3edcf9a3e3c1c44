"""Every key of the schema as a flat list, in the order of the models: what explain, schema and the docs walk over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsrun.config.build import section_in
from dsrun.config.knob import Knob, Section, Status
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import join, show
from dsrun.config.values import expectation


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        path: dotted path.
        section: the section that has it.
        name: its last part.
        types: types of optimizer or scheduler that have this parameter; empty for any other key.
        inner: the section it holds, if it holds one.
    """

    path: str
    section: type[Section]
    name: str
    types: tuple[str, ...] = ()
    inner: type[Section] | None = None

    @property
    def meaning(self) -> Knob:
        """What the key means."""
        return self.section.knob_of(self.name)

    @property
    def status(self) -> Status:
        """What dsrun does with it."""
        if self.inner is not None and self.meaning.status is None:
            return self.inner.default_status
        return self.section.status_of(self.name)

    @property
    def reason(self) -> str:
        """Why it does not work, where it does not."""
        own = self.section.why_of(self.name)
        return self.inner.default_reason or own if self.inner is not None and not self.meaning.reason else own

    @property
    def expected(self) -> str:
        """What its value must be."""
        return self.meaning.expects or expectation(self.section.model_fields[self.name])

    @property
    def is_required(self) -> bool:
        """Whether the section cannot do without it."""
        return self.section.model_fields[self.name].is_required() and self.meaning.choices is None

    @property
    def default(self) -> Any:
        """The default as JSON has it; None where it is unset or required."""
        info = self.section.model_fields[self.name]
        if self.inner is not None or info.is_required():
            return None
        value: Any = info.get_default(call_default_factory=True)
        return list(value) if isinstance(value, tuple) else value

    @property
    def default_text(self) -> str:
        """The default as people read it."""
        if self.is_required:
            return "required"
        if self.default == (1 << 63) - 1:
            return "no limit"
        return "unset" if self.default is None else show(self.default)

    @property
    def other_names(self) -> tuple[str, ...]:
        """Names that are read as this key with a warning."""
        return tuple(old for old, new in self.section.renamed.items() if new == self.name)


def all_keys(section: type[Section] = Training, path: str = "", types: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yields every key, a section before its own keys."""
    for name, info in section.model_fields.items():
        full = join(path, name)
        choices = section.knob_of(name).choices
        inner = None if choices is not None else section_in(info)
        yield Key(full, section, name, types, inner)
        if choices is not None:
            by_model: dict[type[Section], list[str]] = {}
            for kind, model in (*choices.models.items(), *choices.planned.items()):
                if model is not None:
                    by_model.setdefault(model, []).append(kind)
            for model, kinds in by_model.items():
                yield from all_keys(model, full, tuple(kinds))
        elif inner is not None:
            yield from all_keys(inner, full, types)
