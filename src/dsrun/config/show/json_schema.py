"""The schema as JSON Schema (draft 2020-12), for editors: completion, hover texts, red underlines."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from dsrun.config.build import is_list, section_in
from dsrun.config.knob import Choices, Section, Status
from dsrun.config.sections.training import Training
from dsrun.config.show.keys import Key
from dsrun.config.text.tree import join

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
#: Keys that are for people.
_COMMENTS: dict[str, Any] = {"^(_|//)": {}}


def json_schema() -> dict[str, Any]:
    """Returns the schema of the whole config."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dsrun training config",
        **_object(Training, "", {"$schema": {"type": "string"}}),
    }


def _object(section: type[Section], path: str, extra: dict[str, Any]) -> dict[str, Any]:
    properties = dict(extra)
    rules: list[dict[str, Any]] = []
    required: list[str] = []
    for name, info in section.model_fields.items():
        choices = section.knob_of(name).choices
        key = Key(join(path, name), section, name, inner=None if choices else section_in(info))
        if choices is not None:
            properties[name] = {"type": "object", "description": key.meaning.text}
            rules.extend(_rules(choices, name, key.path))
            properties["type"]["enum"] = [*choices.models, *choices.planned]
        else:
            properties[name] = _property(key)
        if key.is_required:
            required.append(name)
    for old, new in section.renamed.items():
        properties[old] = {"deprecated": True, "description": f"Another name of `{new}`."}
    for table, verb in ((section.dropped, "Does nothing"), (section.removed, "Gone")):
        for old, text in table.items():
            properties[old] = {"deprecated": True, "description": f"{verb}: {text}."}
    schema: dict[str, Any] = {
        "type": "object",
        "description": (section.__doc__ or "").strip().split("\n")[0],
        "properties": properties,
        "patternProperties": _COMMENTS,
        "additionalProperties": False,
    }
    if required:
        schema["required"] = required
    if rules:
        schema["allOf"] = rules
    return schema


def _rules(choices: Choices, name: str, path: str) -> list[dict[str, Any]]:
    """`params` by `type`: one rule per model."""
    by_model: dict[type[Section], list[str]] = {}
    for kind, model in (*choices.models.items(), *choices.planned.items()):
        if model is not None:
            by_model.setdefault(model, []).append(kind)
    return [
        {
            "if": {"properties": {"type": {"enum": kinds}}},
            "then": {"properties": {name: _object(model, path, {})}},
        }
        for model, kinds in by_model.items()
    ]


def _property(key: Key) -> dict[str, Any]:
    if key.inner is not None:
        schema: dict[str, Any] = _object(key.inner, key.path, {})
        if is_list(key.section.model_fields[key.name]):
            schema = {"type": "array", "items": schema}
    else:
        schema = _leaf(key)
    schema["description"] = _description(key)
    if key.status is not Status.WORKS and not key.meaning.harmless:
        schema["deprecated"] = key.status is Status.NO_MEANING
    return schema


def _leaf(key: Key) -> dict[str, Any]:
    info = key.section.model_fields[key.name]
    adapter: TypeAdapter[Any] = TypeAdapter(info.rebuild_annotation())
    schema = adapter.json_schema(mode="validation")
    schema = _standard(schema)
    schema.pop("title", None)
    if key.meaning.auto and '"auto"' not in str(schema):
        schema = {"anyOf": [*schema.get("anyOf", [schema]), {"const": "auto"}]}
    if key.default is not None:
        schema["default"] = key.default
    return schema


def _standard(schema: Any) -> Any:
    """Spells bounds as JSON Schema does; pydantic keeps its own words for bounds behind a converter."""
    if isinstance(schema, list):
        return [_standard(item) for item in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    return {_BOUNDS.get(key, key): _standard(value) for key, value in schema.items()}


def _description(key: Key) -> str:
    meaning = key.meaning
    parts = [meaning.text]
    if meaning.unit:
        parts.append(f"Unit: {meaning.unit}.")
    if meaning.effect:
        parts.append(f"Effect: {meaning.effect}.")
    if meaning.stages:
        parts.append(f"Acts at ZeRO stage {', '.join(str(stage) for stage in meaning.stages)}.")
    if key.status is Status.PLANNED:
        parts.append(f"Planned: this version does not {key.reason} yet.")
    elif key.meaning.planned:
        values = " and ".join(f'"{value}"' for value in key.meaning.planned)
        parts.append(f"Planned: {values}; this version does not {key.reason} yet.")
    elif key.status is Status.NO_MEANING:
        parts.append(f"No meaning here: {key.reason}.")
    return " ".join(parts)
