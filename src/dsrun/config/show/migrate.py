"""A modern config out of an old one: today's names and values, what is gone left out, every change said in the file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from dsrun.config.build import is_comment, section_in
from dsrun.config.findings import Code, Finding, Report, Severity
from dsrun.config.knob import Section
from dsrun.config.legacy import translate
from dsrun.config.load import inspect, inspect_tree
from dsrun.config.sections.training import Training
from dsrun.config.text.source import ConfigSource, read_source
from dsrun.config.text.tree import Node, join, show
from dsrun.config.values import as_flag, as_real, as_whole
from dsrun.errors import ConfigError

#: Comment key that lists the changes in the new file.
CHANGES_KEY = "_migrated"

#: Findings that are about this version, not about the file.
_NOT_THE_FILE = (Code.PLANNED, Code.BATCH)


@dataclass(frozen=True, slots=True)
class Migration:
    """A rewritten config.

    Attributes:
        text: the new file, strict JSON, with the changes under `_migrated`.
        changes: changes that were made, one sentence each.
        left: errors that no rewriting can mend, e.g. unknown keys.
    """

    text: str
    changes: tuple[str, ...]
    left: tuple[Finding, ...]


def migrate(source: ConfigSource) -> Migration:
    """Rewrites a config.

    Args:
        source: path of a file (JSON, or YAML by its ending), inline JSON, urlsafe base64 of JSON, or a dict; see
            `load`.

    Raises:
        ConfigError: the source cannot be read, or is no object.
    """
    root, name = read_source(source)
    as_written = deepcopy(root)  # `translate` changes the tree, and a pipe can be read but once
    if root.members is None:
        raise ConfigError(f"{root.at}: the config is no object; there is nothing to migrate")
    report = Report()
    translate(root, report)
    changes = [finding.message for finding in report.findings if finding.severity is not Severity.ERROR]
    document = _rewrite(Training, root, "", changes)
    # Errors that are in both, told with the places of the file that the user has.
    still = {(finding.code, finding.key) for finding in inspect(document).findings}
    left = tuple(
        finding
        for finding in inspect_tree(as_written, name).findings
        if finding.severity is Severity.ERROR
        and finding.code not in _NOT_THE_FILE
        and ((finding.code, finding.key) in still or finding.code is Code.TWO_NAMES)
    )
    if changes:
        document = {CHANGES_KEY: changes, **document}
    return Migration(dump(document), tuple(changes), left)


def dump(document: Mapping[str, Any]) -> str:
    """Returns JSON as people write it: two spaces, short lists on one line, a newline at the end."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return re.sub(r"\[\s+((?:[-\d.e+]+,\s+)*[-\d.e+]+)\s+\]", _on_one_line, text) + "\n"


def _on_one_line(match: re.Match[str]) -> str:
    return f"[{', '.join(match[1].split())}]".replace(",,", ",")


def _rewrite(model: type[Section], node: Node, path: str, changes: list[str]) -> dict[str, Any]:
    """Rewrites one object; keys the schema does not know stay, for only their writer knows what they mean."""
    written: dict[str, Any] = {}
    for key, child in (node.members or {}).items():
        name = key if key in model.model_fields else model.renamed.get(key)
        full = join(path, key)
        if is_comment(key) or (name is None and key not in model.dropped and key not in model.removed):
            written[key] = child.plain()
        elif name is None:
            reason = model.dropped.get(key) or model.removed[key]
            changes.append(f"`{full}` is left out: {reason.removeprefix('drop it; ')}")
        else:
            if name != key:
                changes.append(f"`{full}` is written as `{join(path, name)}`")
            value = _value(model, name, child, join(path, name), node, changes)
            if value == {} and child.members:
                continue  # all that was in it is gone, as the changes say
            written[name] = value
    return written


def _value(model: type[Section], name: str, child: Node, path: str, parent: Node, changes: list[str]) -> Any:
    choices = model.knob_of(name).choices
    inner = section_in(model.model_fields[name]) if choices is None else _chosen(model, name, parent)
    if inner is not None and child.members is not None:
        return _rewrite(inner, child, path, changes)
    plain = child.plain()
    number = _as_number(model, name, plain)
    if number is not None and (type(number) is not type(plain)):
        changes.append(f"`{path}` {show(plain)} is written as the number {show(number)}")
        return number
    if isinstance(plain, str) and "as_flag" in str(model.model_fields[name].rebuild_annotation()):
        flag = as_flag(plain)
        if isinstance(flag, bool):
            changes.append(f"`{path}` {show(plain)} is written as {show(flag)}")
            return flag
    return plain


def _chosen(model: type[Section], name: str, parent: Node) -> type[Section] | None:
    choices = model.knob_of(name).choices
    kind = (parent.members or {}).get("type")
    if choices is None or kind is None or not isinstance(kind.value, str):
        return None
    found = choices.find(kind.value)
    return choices.models[found] if found is not None else choices.planned.get(kind.value)


def _as_number(model: type[Section], name: str, plain: Any) -> int | float | None:
    """The number that text or an integral float stands for, where the key wants a number."""
    if not isinstance(plain, (str, float)):
        return None
    annotation = str(model.model_fields[name].rebuild_annotation())
    try:
        if "as_whole" in annotation:
            number = as_whole(plain)
        elif "as_real" in annotation and isinstance(plain, str):
            number = as_real(plain)
        else:
            return None
    except ValueError:  # beyond every number here: it stays as written, for `config check` to refuse
        return None
    return number if isinstance(number, (int, float)) else None
