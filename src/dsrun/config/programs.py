"""Configs that programs make: the forms that trainers leave in a dict, read with a note for each thing that is changed.

Who wrote a file can mend it, and is told what is wrong. Who runs a trainer cannot mend the dict that it makes. Nothing
here decides which of the two a config is, and what is unknown or impossible is refused in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo

from dsrun.config.build import is_comment, section_in
from dsrun.config.findings import Code, Finding, Report, Severity
from dsrun.config.knob import Auto, Section
from dsrun.config.provenance import Kind, Source
from dsrun.config.text.tree import Node, Position, join, place_name, printable, show
from dsrun.config.values import choices_of

#: Units of values that are counted in whole ones, and which trainers compute as a share of something.
_WHOLE_UNITS = ("elements",)


@dataclass(slots=True)
class _Changes:
    """What reading a config changes.

    Attributes:
        report: report that receives a note for each change.
        defaults: words by dotted path: what each key that was left at `"auto"` is read as.
        sources: origin of the values of these keys.
    """

    report: Report
    defaults: dict[str, str] = field(default_factory=dict[str, str])
    sources: dict[str, Source] = field(default_factory=dict[str, Source])


def rewrite_program_forms(root: Node, model: type[Section], report: Report) -> dict[str, Source]:
    """Rewrites in place what trainers leave in a config: keys with dots, parts of elements, `"auto"`.

    A key with dots names a key of a section. `"auto"` that nothing fills in later is as if the key were left out.

    Args:
        root: the whole config; edited.
        model: model of the whole config.
        report: report that receives the notes, and an error where a key is written in two ways that differ.

    Returns:
        Origin of each value that was `"auto"`, by dotted path.
    """
    changes = _Changes(report)
    _rewrite_section(model, root, "", changes)
    if changes.defaults:
        listed = ", ".join(f"`{path}` {shown}" for path, shown in changes.defaults.items())
        keys = "a key, which takes" if len(changes.defaults) == 1 else f"{len(changes.defaults)} keys, which take"
        report.note(Code.AUTO, "", f'"auto" was left in {keys} the default: {listed}', root.at)
    return changes.sources


def fold_idle_keys(findings: Sequence[Finding], at: Position) -> tuple[Finding, ...]:
    """Returns the findings with one note for all keys that do nothing, which trainers write by the dozen.

    Args:
        findings: findings of a config.
        at: place of the whole config.
    """
    idle = [finding for finding in findings if finding.code is Code.NO_EFFECT and finding.severity is Severity.WARNING]
    if not idle:
        return tuple(findings)
    keys = list(dict.fromkeys(f"`{finding.key}`" for finding in idle))
    message = f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect here"
    hint = "write the config to a file: `dsrun config check FILE` says why"
    return (
        *(finding for finding in findings if finding not in idle),
        Finding(Severity.NOTE, Code.NO_EFFECT, "", message, hint, at),
    )


def _rewrite_section(model: type[Section], node: Node, path: str, changes: _Changes) -> None:
    members = node.members
    if members is None:
        return
    for key in [key for key in members if "." in key and not is_comment(key)]:
        _expand(model, node, path, key, changes.report)
    for key, child in members.items():
        if key in model.removed:
            _turn_off(child)
        name = _field_named(model, key)
        if name is None or is_comment(key):
            continue
        full, inner = join(path, name), _object_in(model, name, members)
        if inner is not None and child.value != "auto":
            _rewrite_section(inner, child, full, changes)
        elif child.value == "auto":
            _leave_out(model, name, child, full, changes, is_section=inner is not None)
        elif model.knob_of(name).unit in _WHOLE_UNITS and (whole := _whole_below(child.value)) is not None:
            message = f"`{full}` is {show(child.value)}; read as {whole}, for {model.knob_of(name).unit} are whole"
            changes.report.note(Code.OTHER_KIND, full, message, child.at)
            child.value = whole


def _expand(model: type[Section], node: Node, path: str, key: str, report: Report) -> None:
    """Moves the value of a key with dots to where the dots say; one that names no section stays, and is refused."""
    assert node.members is not None, "only objects have keys"
    place, owner = node, model
    *sections, last = key.split(".")
    steps: list[tuple[str, type[Section]]] = []
    members: dict[str, Node] = node.members
    for part in sections:
        name = _field_named(owner, part)
        inner = None if name is None else _object_in(owner, name, members)
        if name is None or inner is None:
            return
        written = next((other for other in members if _field_named(owner, other) == name), name)
        steps.append((written, inner))
        members = (members[written].members or {}) if written in members else {}
        owner = inner
    full, at = join(path, printable(key, 100)), node.keys_at.get(key, node.at)
    value = node.members.pop(key)
    node.keys_at.pop(key, None)
    for written, _ in steps:
        assert place.members is not None, "each step on the way is an object"
        below = place.members.get(written)
        if below is None or below.value in (None, "auto"):
            below = place.members[written] = Node({}, at)
            place.keys_at[written] = at
        if below.members is None:
            message = f"`{full}` is a key of `{written}`, which is {show(below.plain())} beside it; expected one"
            report.error(Code.TWO_NAMES, full, message, at, "leave out one of them")
            return
        place = below
    _put(owner, place, last, value, full=full, section=join(path, ".".join(sections)), at=at, report=report)


def _put(
    model: type[Section],
    place: Node,
    key: str,
    value: Node,
    *,
    full: str,
    section: str,
    at: Position,
    report: Report,
) -> None:
    """Puts the value of a key with dots beside the keys of its section, where it may stand already."""
    assert place.members is not None, "the section is an object"
    name = _field_named(model, key)
    written = next((other for other in place.members if name is not None and _field_named(model, other) == name), key)
    here = place.members.get(written)
    if here is None or here.value in (None, "auto"):
        if written in place.members:
            del place.members[written]
        place.members[key] = value
        place.keys_at[key] = at
        message = f"`{full}` is written as one key, with dots; read as a key of {place_name(section)}"
        report.note(Code.OLD_SPELLING, full, message, at)
        return
    if value.value in (None, "auto"):
        return
    one, other = here.plain(), value.plain()
    if one == other or one == _whole_below(other) or other == _whole_below(one):
        message = f"`{full}` is written as one key, with dots, and in {place_name(section)} too; both say the same"
        report.note(Code.OLD_SPELLING, full, message, at)
        return
    both = f"`{full}` is {show(value.plain())} as one key, with dots, and {show(here.plain())} in {place_name(section)}"
    if name is not None and model.knob_of(name).unit in _WHOLE_UNITS:
        # Sizes change no result, and trainers compute them for configs in which somebody chose them.
        message = f"{both}; the latter counts, as in DeepSpeed, which reads no key with dots"
        report.note(Code.TWO_NAMES, full, message, at)
    else:
        report.error(Code.TWO_NAMES, full, f"{both}; expected one value", at, "leave out one of them")


def _leave_out(model: type[Section], name: str, child: Node, full: str, changes: _Changes, *, is_section: bool) -> None:
    """Makes `"auto"` as if the key were left out, unless it means something, or the key cannot be left out."""
    info = model.model_fields[name]
    if info.is_required():
        return
    if not is_section:
        auto = model.knob_of(name).auto
        is_filled_in_later = auto in (Auto.MODEL, Auto.SCRIPT)
        is_a_value = info.default == "auto" or (auto is None and "auto" in choices_of(info.annotation))
        if is_filled_in_later or is_a_value:
            return
    child.value = None
    changes.sources[full] = Source(Kind.AUTO, child.at, Auto.DEFAULT.value)
    changes.defaults[full] = "left out" if is_section else _default_in_words(model, name, info)


def _default_in_words(model: type[Section], name: str, info: FieldInfo) -> str:
    if model.knob_of(name).auto is Auto.OPTIMIZER_LR:
        return Auto.OPTIMIZER_LR.value
    default: Any = info.get_default(call_default_factory=True)
    return "none" if default is None else show(list(default) if isinstance(default, tuple) else default)


def _turn_off(child: Node) -> None:
    """Makes `"auto"` of a section that is gone mean that it is off."""
    switch = None if child.members is None else child.members.get("enabled")
    for node in (child, switch):
        if node is not None and node.value == "auto":
            node.value = False


def _field_named(model: type[Section], key: str) -> str | None:
    """The field that a key means, by today's name or an older one."""
    return key if key in model.model_fields else model.renamed.get(key)


def _object_in(model: type[Section], name: str, members: dict[str, Node]) -> type[Section] | None:
    """The section that a field holds, also where the key `type` beside it says which; None for plain values."""
    choices = model.knob_of(name).choices
    if choices is None:
        return section_in(model.model_fields[name])
    kind = members["type"].value if "type" in members else None
    chosen = choices.find(kind) if isinstance(kind, str) else None
    return Section if chosen is None else choices.models[chosen]


def _whole_below(value: object) -> int | None:
    """The whole number below a fraction; None where the value is none."""
    if not isinstance(value, float) or not math.isfinite(value) or value.is_integer():
        return None
    return math.floor(value)
