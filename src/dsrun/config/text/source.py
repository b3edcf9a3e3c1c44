"""From what the user gave to a tree: a path, inline JSON, urlsafe base64, or a dict. Knows no config key."""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun.config.text.json_parser import parse_json
from dsrun.config.text.tree import Node, from_plain
from dsrun.errors import ConfigError
from dsrun.units import format_bytes

#: Path of a file (JSON, or YAML by its ending), inline JSON, urlsafe base64 of JSON, or a dict.
ConfigSource = str | os.PathLike[str] | Mapping[str, Any]

#: Largest text that is parsed; the largest real config seen has 15 KB.
MAX_BYTES = 1 << 20
#: The same for YAML, whose parser may be the slow one in Python.
MAX_YAML_BYTES = 1 << 16

_YAML_ENDINGS = (".yaml", ".yml")
#: Where a shell's pipes to this process have their names; these have a writer.
_OPEN_FILES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_BASE64 = re.compile(r"[A-Za-z0-9_\-+/]{4,}={0,2}\s*")


def read_source(source: ConfigSource) -> tuple[Node, str]:
    """Reads a config into a tree.

    Args:
        source: path of a file (JSON, or YAML by its ending), inline JSON, urlsafe base64 of JSON, or a dict.

    Returns:
        The tree, and what messages call the source: the path as given, `<inline>`, `<base64>` or `<dict>`.

    Raises:
        ConfigError: there is no such file, it cannot be read, or its text is malformed.
    """
    if isinstance(source, Mapping):
        return from_plain(source, "<dict>"), "<dict>"
    if isinstance(source, str):
        if source.lstrip().startswith("{"):
            return parse_json(_bounded(source, "<inline>"), "<inline>"), "<inline>"
        if not _exists(Path(source)):
            text = _from_base64(source)
            if text is not None:
                return parse_json(_bounded(text, "<base64>"), "<base64>"), "<base64>"
    elif not isinstance(source, os.PathLike) or isinstance(os.fspath(source), bytes):  # pyright: ignore
        kind = type(source).__name__
        raise ConfigError(f"the config is of type {kind}; expected a path, JSON text or a dict")
    return _parse_file(Path(source)), os.fspath(source)


def _parse_file(path: Path) -> Node:
    is_yaml = path.suffix.lower() in _YAML_ENDINGS
    text = _decode(_read_bytes(path, MAX_YAML_BYTES if is_yaml else MAX_BYTES), str(path))
    if is_yaml:
        from dsrun.config.text.yaml_parser import parse_yaml

        return parse_yaml(text, str(path))
    return parse_json(text, str(path))


def _read_bytes(path: Path, limit: int) -> bytes:
    if not _exists(path):
        raise ConfigError(f"file not found: {_cut(str(path))}", hint=_similar(path))
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; expected a config file", hint=_similar(path / "ds.json"))
    # Opening a pipe waits until somebody writes, and a device may have no end: either may be never.
    kind = "a named pipe" if path.is_fifo() else "a device" if path.is_char_device() or path.is_block_device() else None
    if kind is not None and not str(path).startswith(_OPEN_FILES):
        raise ConfigError(f"{path} is {kind}; expected a config file", hint="`/dev/stdin` and `<(command)` work")
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        size = path.stat().st_size
        raise ConfigError(
            f"{path}: has {format_bytes(max(size, len(data)))}; a config has at most {format_bytes(limit)}"
        )
    return data


def _decode(data: bytes, source: str) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError(f"{source}: is UTF-16 text; expected UTF-8", hint="save the file as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ConfigError(f"{source}:{line}:{column}: byte 0x{data[error.start]:02x} is not UTF-8") from error


def _bounded(text: str, source: str) -> str:
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: has {format_bytes(len(text))}; a config has at most {format_bytes(MAX_BYTES)}")
    return text


def _from_base64(text: str) -> str | None:
    """Decodes urlsafe base64 of a JSON object; None where the text is nothing of the kind."""
    if not _BASE64.fullmatch(text):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text.strip().replace("+", "-").replace("/", "_")).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return decoded if decoded.lstrip("\ufeff \t\r\n").startswith("{") else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or a NUL byte in it
        return False


def _cut(text: str) -> str:
    shown = "".join(char if char.isprintable() else "?" for char in text[:121])
    return shown if len(text) <= 120 else shown[:117] + "..."


def _similar(path: Path) -> str | None:
    """Names files beside `path` that the user may have meant."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except (OSError, ValueError):
        return None
    configs = sorted(name for name in names if name.endswith((".json", *_YAML_ENDINGS)))
    close = difflib.get_close_matches(path.name, configs, n=3, cutoff=0.5)
    if not close:
        return None
    return f"did you mean {' or '.join(f'`{path.parent / name}`' for name in close)}?"
