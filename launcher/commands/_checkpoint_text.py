"""Checkpoints as rows of a table, as lines and as JSON. Reads no files, and no clock but the one it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from math import isfinite
from typing import Any

from dsrun.checkpoint_files.folder.listing import Tag, TagState, step_of
from dsrun.checkpoint_files.index.value import Index
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.summary import shares
from dsrun.checkpoint_files.verbs.compare import TensorDifference, ValueDifference, absent
from dsrun.units import format_bytes, format_count

from ..jobs.text import short_duration

#: Values that have lines or tables of their own, or are told by `--json` alone.
_APART = frozenset({"counters", "optimizer", "scheduler", "config", "versions", "git", "torch", "frozen", "latest"})


def columns(table: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Aligns the cells of rows.

    Args:
        table: rows of as many cells each.
        right: columns of numbers.
    """
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*table, strict=True)]
    lines: list[str] = []
    for row in table:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def tags_table(tags: Sequence[Tag], *, now: float) -> list[str]:
    """Returns a line a tag, below a head.

    Args:
        tags: oldest first.
        now: current time, seconds since the epoch.
    """
    shared = any(tag.shared_bytes for tag in tags)
    rows = [["TAG", "STEP", "SIZE", *(["SHARED"] if shared else []), "AGE", "STATE"]]
    for tag in tags:
        step = "-" if tag.step is None else str(tag.step)
        state = tag.state.value + (", latest" if tag.is_latest else "")
        sizes = [format_bytes(tag.nbytes), *([format_bytes(tag.shared_bytes)] if shared else [])]
        rows.append([tag.name, step, *sizes, short_duration(now - tag.saved), state])
    return columns(rows, right=frozenset(range(1, len(rows[0]) - 1)))


def tag_json(tag: Tag) -> dict[str, Any]:
    """Returns what programs get to know of a tag in a list."""
    return {
        "tag": tag.name,
        "state": tag.state.value,
        "reason": tag.reason,
        "step": tag.step,
        "bytes": tag.nbytes,
        "shared_bytes": tag.shared_bytes,
        "saved": _moment(tag.saved),
        "latest": tag.is_latest,
    }


def notes(tags: Sequence[Tag]) -> list[str]:
    """Returns what stands below the table: why a tag is not whole."""
    return [f"{tag.name}: {tag.state.value}: {tag.reason}" for tag in tags if tag.state is not TagState.COMPLETE]


def index_json(path: Place, index: Index, *, saved: float, shared: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns everything that an index says, but for where each box lies; `shared` is as in `index_text`."""
    return {
        "path": str(path),
        "format": index.format,
        "saved": _moment(saved),
        "world_size": index.world_size,
        "values": index.values,
        "aliases": index.aliases,
        "files": {name: file.nbytes for name, file in index.files.items()},
        "shared": {name: list(tags) for name, tags in shared.items()},
        "shares": [
            {"role": s.role, "dtype": s.dtype, "tensors": s.tensors, "elements": s.numel, "bytes": s.nbytes}
            for s in shares(index)
        ],
        "tensors": [
            {"name": name, "role": role, "dtype": stored.dtype, "shape": list(stored.shape)}
            for (name, role), stored in index.tensors.items()
        ],
    }


def index_text(
    path: Place, index: Index, *, saved: float, now: float, shared: Mapping[str, Sequence[str]]
) -> list[str]:
    """Returns lines about a checkpoint.

    Args:
        path: the tag's folder.
        index: its index.
        saved: time when the checkpoint was saved, seconds since the epoch.
        now: current time, seconds since the epoch.
        shared: files that are other tags' too, with the names of these.
    """
    nbytes = sum(file.nbytes for file in index.files.values())
    when = datetime.fromtimestamp(saved).astimezone().isoformat(sep=" ", timespec="seconds")
    rows: list[tuple[str, str]] = [
        ("checkpoint", str(path)),
        ("saved", f"{when} ({short_duration(now - saved)} ago)"),
        ("step", "not known" if step_of(index) is None else str(step_of(index))),
        ("ranks", str(index.world_size)),
        ("files", f"{len(index.files)}, {format_bytes(nbytes)}"),
        ("format", f"{index.format}" + ("" if index.format > 1 else ", without checksums")),
    ]
    if shared:
        common = format_bytes(sum(index.files[name].nbytes for name in shared))
        others = list(dict.fromkeys(tag for tags in shared.values() for tag in tags))
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        rows.append(("shared", f"{common} of them with {', '.join(others[-4:])}{more}"))
    rows += _value_rows(index.values)
    if index.aliases:
        tied = [f"{alias} = {name}" for alias, name in index.aliases.items()]
        rows.append(("tied", "; ".join(tied[:4]) + (f"; and {len(tied) - 4} more" if len(tied) > 4 else "")))
    table = [("ROLE", "DTYPE", "TENSORS", "ELEMENTS", "SIZE")]
    for s in shares(index):
        table.append((s.role, s.dtype, str(s.tensors), format_count(s.numel), format_bytes(s.nbytes)))
    return [*columns(rows), "", *columns(table, right=frozenset({2, 3, 4}))]


def differences_text(tensors: Sequence[TensorDifference], values: Sequence[ValueDifference]) -> list[str]:
    """Returns a line for everything that differs: tensors first."""
    rows = [("TENSOR", "ROLE", "DIFFERS", "LARGEST DIFFERENCE")]
    for one in tensors:
        what = f"{one.differing} of {one.numel}" if one.kind == "values" else f"{one.kind} {one.detail}".rstrip()
        rows.append((one.name, one.role, what, f"{one.largest:.6g}" if one.kind == "values" else ""))
    lines = columns(rows) if tensors else []
    if values:
        table = [("VALUE", "A", "B"), *((one.path, _short(one.first), _short(one.second)) for one in values)]
        lines += [*([""] if lines else []), *columns(table)]
    return lines


def differences_json(
    paths: Sequence[Place], tensors: Sequence[TensorDifference], values: Sequence[ValueDifference]
) -> dict[str, Any]:
    """Returns the same for programs; a difference that is no number is null, and a value that one has not is absent."""
    return {
        "a": str(paths[0]),
        "b": str(paths[1]),
        "tensors": [
            {
                "name": one.name,
                "role": one.role,
                "kind": one.kind,
                "detail": one.detail,
                "differing": one.differing,
                "elements": one.numel,
                "largest": one.largest if isfinite(one.largest) else None,
            }
            for one in tensors
        ],
        "values": [
            {
                "path": one.path,
                **({} if one.first is absent else {"a": one.first}),
                **({} if one.second is absent else {"b": one.second}),
            }
            for one in values
        ],
    }


def _value_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    counters = values.get("counters")
    if isinstance(counters, dict):
        rows.append(("counters", _pairs(counters)))
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict):
        rows.append(("optimizer", f"{optimizer.get('type')}, {_groups(optimizer.get('groups'))}"))
    scheduler = values.get("scheduler")
    if isinstance(scheduler, dict):
        rows.append(("scheduler", str(scheduler.get("type"))))
    versions = values.get("versions")
    if isinstance(versions, dict):
        rows.append(("versions", _pairs(versions)))
    git = values.get("git")
    if isinstance(git, dict):
        rows.append(("git", f"{git.get('commit')}" + (", with changes" if git.get("changed") else "")))
    for name, value in values.items():
        if name not in _APART and value not in (None, {}, []):
            rows.append((name.replace("_", " "), _pairs(value) if isinstance(value, dict) else _short(value)))
    config = values.get("config")
    if isinstance(config, dict) and config:
        rows.append(("config", f"{', '.join(sorted(map(str, config)))} (`--config` prints it)"))
    return rows


def _groups(groups: Any) -> str:
    if not isinstance(groups, list):
        return "groups not known"
    rates = [str(group.get("lr")) for group in groups if isinstance(group, dict)]
    return f"{len(groups)} group{'' if len(groups) == 1 else 's'}, lr {', '.join(rates)}"


def _pairs(values: Mapping[str, Any]) -> str:
    return _short(", ".join(f"{name} {value}" for name, value in values.items() if not isinstance(value, dict | list)))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
