"""From a tree to a checked section: known keys, types, `"auto"`, and the place of every complaint.

Sections are built inside out, so that pydantic only ever sees one flat object and every message is ours. What a key
that is valid *does* here is judged afterwards, in `status`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dsrun.config.findings import Code, Report
from dsrun.config.knob import Auto, Choices, Section
from dsrun.config.provenance import Kind, Source
from dsrun.config.suggest import suggest_key, suggest_value
from dsrun.config.text.tree import Node, Position, join, place_name, printable, show
from dsrun.config.values import LARGEST, alternatives, choices_of, expectation, is_other_kind, number_of
from dsrun.contract.monitor_records import SECRET_KEYS

_MOST_SUGGESTIONS = 20


@dataclass(slots=True)
class Build:
    """What building a config gathers beside the sections.

    Attributes:
        root: model of the whole config, for suggestions.
        report: report that receives every complaint.
        sources: origin of each given value, by the dotted path of its key.
        unknown_keys: number of unknown keys found so far.
    """

    root: type[Section]
    report: Report
    sources: dict[str, Source] = field(default_factory=dict[str, Source])
    unknown_keys: int = 0


def is_comment(key: str) -> bool:
    """Keys that are for people: `_comment`, `//`, `$schema`."""
    return key.startswith(("_", "//")) or key == "$schema"


def section_in(info: FieldInfo) -> type[Section] | None:
    """The section a field holds, also where it may be absent; None for plain values and chosen models."""
    for part in (info.annotation, *get_args(info.annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def is_list(info: FieldInfo) -> bool:
    """Whether a field that holds a section holds a list of them."""
    return get_origin(info.annotation) is tuple


def build_section(model: type[Section], node: Node, path: str, build: Build) -> Section | None:
    """Checks one object and everything inside it.

    Args:
        model: section class that describes the expected object.
        node: the object as written.
        path: its dotted path, empty for the whole config.
        build: collector of the complaints and of the origins of values.

    Returns:
        The section, with defaults in place of what is wrong; None where it cannot exist without what is wrong.
    """
    members = node.members
    if members is None:
        message = f"{_subject(path)} is {_shown(node)}; expected an object"
        build.report.error(Code.BAD_VALUE, path, message, node.at, _as_switch(model, node))
        return None
    values: dict[str, Any] = {}
    for name, key_at, child in _known_members(model, members, node, path, build):
        info = model.model_fields[name]
        child_path = join(path, name)
        if child.value is None:
            continue
        if model.knob_of(name).choices is not None:
            continue
        inner = section_in(info)
        if inner is not None and is_list(info):
            items = _build_items(inner, child, child_path, build)
            if items is not None:
                values[name] = items
                build.sources.setdefault(child_path, Source(Kind.FILE, key_at))
        elif inner is not None:
            section = build_section(inner, child, child_path, build)
            if section is not None:
                values[name] = section
        elif _resolve_auto(model, name, child, child_path, build) and _is_finite(model, name, child, child_path, build):
            values[name] = child.plain()
            build.sources.setdefault(child_path, Source(Kind.FILE, key_at))
    _build_choices(model, values, members, node, path, build)
    return _instance(model, values, members, node, path, build)


def _build_items(model: type[Section], node: Node, path: str, build: Build) -> tuple[Section, ...] | None:
    """Checks a list of objects, each at its place in the list; None where it is no list, or one cannot exist."""
    if not isinstance(node.value, list):
        build.report.error(Code.BAD_VALUE, path, f"`{path}` is {_shown(node)}; expected a list of objects", node.at)
        return None
    sections = [build_section(model, child, f"{path}[{place}]", build) for place, child in enumerate(node.value)]
    found = tuple(section for section in sections if section is not None)
    return found if len(found) == len(sections) else None


def _known_members(
    model: type[Section], members: dict[str, Node], node: Node, path: str, build: Build
) -> Iterator[tuple[str, Position, Node]]:
    """Yields the members that are keys of `model`, by today's name; complains about the others."""
    seen: dict[str, str] = {}
    for key, child in members.items():
        key_at = node.keys_at.get(key, child.at)
        if is_comment(key):
            continue
        full = join(path, printable(key, 60))
        name = key if key in model.model_fields else model.renamed.get(key)
        if name is not None:
            if name in seen:
                message = f"`{full}` and `{join(path, seen[name])}` are names of the same key; expected one"
                build.report.error(Code.TWO_NAMES, full, message, key_at)
                continue
            seen[name] = key
            if name != key:
                message = f"`{full}` is another name of `{join(path, name)}`, and read as that"
                build.report.warning(Code.OLD_SPELLING, full, message, key_at)
                if child.value is not None:
                    build.sources[join(path, name)] = Source(Kind.FILE, key_at, f"written as `{key}`")
            yield name, key_at, child
        elif key in model.dropped:
            build.report.warning(Code.OLD_SPELLING, full, f"`{full}` does nothing: {model.dropped[key]}", key_at)
        elif key in model.removed:
            _removed(full, model.removed[key], child, key_at, build.report)
        else:
            message = f"`{full}` is not a key of {place_name(path)}"
            build.unknown_keys += 1
            # Looking for what was meant takes longer than all the rest; nobody misspells this many keys.
            is_too_many = build.unknown_keys > _MOST_SUGGESTIONS
            hint = None if is_too_many else suggest_key(key, model, path, build.root)
            build.report.error(Code.UNKNOWN_KEY, full, message, key_at, hint)


def _removed(full: str, instead: str, child: Node, key_at: Position, report: Report) -> None:
    """Refuses a key that is gone, unless it is there to say no."""
    members = child.members
    switch = members.get("enabled") if members is not None else None
    off = child.value in (False, None) or members == {} or (switch is not None and switch.value is False)
    if off:
        report.warning(Code.REMOVED, full, f"`{full}` does nothing: it is gone, and off here", key_at, instead)
    else:
        report.error(Code.REMOVED, full, f"`{full}` is gone, from DeepSpeed as from here", key_at, instead)


def _resolve_auto(model: type[Section], name: str, child: Node, path: str, build: Build) -> bool:
    """Turns `"auto"` into something; returns whether a value is left to check."""
    if child.value != "auto":
        return True
    info, meaning = model.model_fields[name], model.knob_of(name)
    match meaning.auto:
        case Auto.MODEL:
            build.sources[path] = Source(Kind.AUTO, child.at, Auto.MODEL.value)
            return True
        case Auto.DEFAULT | Auto.OPTIMIZER_LR | Auto.SCRIPT:
            source = Source(Kind.AUTO, child.at, meaning.auto.value)
            build.sources[path] = source
            if meaning.auto is not Auto.SCRIPT and "auto" not in choices_of(info.annotation):
                shown = meaning.auto.value
                if meaning.auto is Auto.DEFAULT:
                    shown = f"{_default_shown(info)}, {shown}"
                build.report.note(Code.AUTO, path, f'`{path}` is "auto"; read as {shown}', child.at)
            return False
        case None | Auto.OTHER_PRECISION:
            if "auto" in choices_of(info.annotation):
                return True
            message = f'`{path}` is "auto", which nothing here can fill in; expected {_wanted(model, name)}'
            hint = 'write the value; some trainers replace "auto" before the config is read, dsrun starts without one'
            build.report.error(Code.AUTO, path, message, child.at, hint)
            return False


def _default_shown(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=False)
    return show(list(default) if isinstance(default, tuple) else default)


def _is_finite(model: type[Section], name: str, child: Node, path: str, build: Build) -> bool:
    """Refuses NaN anywhere; infinity is left to the type."""
    for node in _leaves(child):
        if isinstance(node.value, float) and math.isnan(node.value):
            build.report.error(Code.BAD_VALUE, path, f"`{path}` is NaN; expected {_wanted(model, name)}", node.at)
            return False
    return True


def _leaves(node: Node) -> Iterator[Node]:
    if not isinstance(node.value, (dict, list)):
        yield node
        return
    for child in node.value.values() if isinstance(node.value, dict) else node.value:
        yield from _leaves(child)


def _build_choices(
    model: type[Section], values: dict[str, Any], members: dict[str, Node], node: Node, path: str, build: Build
) -> None:
    """Builds `params`, whose model the sibling `type` names."""
    for name in model.model_fields:
        choices = model.knob_of(name).choices
        if choices is None or not isinstance(values.get("type"), str):
            continue
        chosen = choices.find(values["type"])
        if chosen is None:
            _refuse_type(choices, values["type"], members["type"].at, join(path, "type"), build.report)
            planned = next((m for t, m in choices.planned.items() if t.lower() == values["type"].lower()), None)
            if planned is not None and name in members:
                build_section(planned, members[name], join(path, name), build)
            continue
        values["type"] = chosen
        child = members.get(name)
        if child is None or child.value is None:
            child = Node({}, node.at)
        section = build_section(choices.models[chosen], child, join(path, name), build)
        if section is not None:
            values[name] = section


def _refuse_type(choices: Choices, written: str, at: Position, full: str, report: Report) -> None:
    lower = written.lower()
    gone = next((hint for known, hint in choices.removed.items() if known.lower() == lower), None)
    if gone is not None:
        report.error(
            Code.REMOVED, full, f"`{full}` is {show(written)}, which is gone, from DeepSpeed as from here", at, gone
        )
        return
    built = alternatives([f'"{known}"' for known in choices.models])
    if lower in (known.lower() for known in choices.planned):
        message = f"`{full}` is {show(written)}; this version does not build that {choices.noun} yet"
        report.error(Code.PLANNED, full, message, at, f"write {built}, or hand the {choices.noun} to `initialize`")
        return
    hint = suggest_value(written, (*choices.models, *choices.planned))
    report.error(Code.BAD_VALUE, full, f"`{full}` is {show(written)}; expected {built}", at, hint)


def _instance(
    model: type[Section], values: dict[str, Any], members: dict[str, Node], node: Node, path: str, build: Build
) -> Section | None:
    """Validates the flat values; leaves out what is wrong and tries once more, so that the rest is still judged."""
    try:
        section = model.model_validate(values)
    except ValidationError as error:
        for name in dict.fromkeys(str(detail["loc"][0]) for detail in error.errors(include_url=False)):
            _complain(model, name, values, members, node, path, build)
            values.pop(name, None)
        try:
            section = model.model_validate(values)
        except ValidationError:
            return None
    for name in values:
        if section_in(model.model_fields[name]) is None and model.knob_of(name).choices is None:
            _note_other_kind(_member(model, name, members), getattr(section, name), join(path, name), build.report)
    return section


def _note_other_kind(child: Node, read: Any, full: str, report: Report) -> None:
    leaves = list(_leaves(child))
    values: list[Any] = list(cast("tuple[Any, ...]", read)) if isinstance(read, tuple) else [read]
    for leaf, value in zip(leaves, values, strict=False):  # an object has more leaves, and no numbers to compare with
        if is_other_kind(leaf.value, value):
            written = f"the text {show(leaf.value)}" if isinstance(leaf.value, str) else show(leaf.value)
            hint = f'write "{full.rpartition(".")[2]}": {show(value)}' if leaf is child else f"write {show(value)}"
            report.note(Code.OTHER_KIND, full, f"`{full}` is {written}; read as {show(value)}", leaf.at, hint)


def _member(model: type[Section], name: str, members: dict[str, Node]) -> Node:
    """Returns what was written for a field, under any of its names."""
    return next(members[key] for key in members if key == name or model.renamed.get(key) == name)


def _complain(
    model: type[Section],
    name: str,
    values: dict[str, Any],
    members: dict[str, Node],
    node: Node,
    path: str,
    build: Build,
) -> None:
    full = join(path, name)
    if name in values:
        child = _member(model, name, members)
        shown = "a secret" if name in SECRET_KEYS else _shown(child)
        hint = suggest_value(values[name], choices_of(model.model_fields[name].annotation)) or _see(full)
        build.report.error(
            Code.BAD_VALUE,
            full,
            f"`{full}` is {shown}; expected {_limited(_wanted(model, name), child)}",
            child.at,
            hint,
        )
        return
    said = any(key == full or key.startswith(f"{full}.") for key in build.report.broken_keys)
    if not said and model.knob_of(name).choices is None:  # missing `params` follow from a wrong `type`
        build.report.error(Code.MISSING, full, f"`{full}` is missing; expected {_wanted(model, name)}", node.at)


def _as_switch(model: type[Section], node: Node) -> str | None:
    """`"fp16": true` was meant as its switch."""
    if model.switch is None or not isinstance(node.value, (str, bool)):
        return None
    return f'write {{"{model.switch[0]}": {show(node.value)}}}'


def _see(full: str) -> str:
    key = re.sub(r"\[\d+\]", "", full)
    return f"see `dsrun config explain {key}`"


def _wanted(model: type[Section], name: str) -> str:
    return model.knob_of(name).expects or expectation(model.model_fields[name])


def _limited(wanted: str, child: Node) -> str:
    """Adds the bound that all whole numbers have where a value is beyond it; else it only lengthens messages."""
    number = number_of(child.value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    return f"{wanted}, up to {LARGEST}" if is_number and number > LARGEST and "whole number" in wanted else wanted


def _subject(path: str) -> str:
    return f"`{path}`" if path else "the config"


def _shown(node: Node) -> str:
    if node.members is not None:
        return "an object"
    if isinstance(node.value, list) and len(node.value) > 8:
        return f"a list of {len(node.value)}"
    if isinstance(node.value, list) and any(isinstance(item.value, (dict, list)) for item in node.value):
        return "a list"
    return show(node.plain())
