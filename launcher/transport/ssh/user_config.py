"""The user's ssh_config as paramiko can read it: `Include` carried out, and what it cannot follow found. No connection.

paramiko reads every keyword and passes over those that it does not know. Some of them say where a connection goes,
whom it trusts or who logs in: to pass over these would reach another host than `ssh` does, or none, without a word.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Where ssh looks, the first value counting. Relative `Include`s are looked for beside the file.
CONFIGS = ("~/.ssh/config", "/etc/ssh/ssh_config")
#: Files within files; ssh's own limit.
_MAX_DEPTH = 16
_LINE = re.compile(r"^\s*(\w+)(?:\s*=\s*|\s+)(.*?)\s*$")
#: What holds for every host, so that it may be left and taken up again.
_ANY_HOST = ("host *", "match all")
#: The keywords nobody here follows, and the values with which they ask for nothing. Left out is what only narrows the
#: ciphers and ways of login, for distributions set it and server and client agree on one by themselves.
_NOT_FOLLOWED: Mapping[str, tuple[str, ...]] = {
    "AddressFamily": ("any",),
    "BindAddress": (),
    "BindInterface": (),
    "CertificateFile": ("none",),
    "HostKeyAlias": (),
    "IdentityAgent": ("none", "ssh_auth_sock"),
    # Carried out, but where sections of other hosts would have to be read within a section.
    "Include": (),
    "KnownHostsCommand": ("none",),
    "PKCS11Provider": ("none",),
    "RevokedHostKeys": ("none",),
    "SecurityKeyProvider": ("internal", "none"),
}


def read_configs(paths: Sequence[Path]) -> str:
    """Returns the files as one text, without those that do not exist, and with what they include in its place.

    Raises:
        OSError: a file cannot be read.
    """
    lines: list[str] = []
    for path in paths:
        if path.exists():
            # As before any section; the last one of the file before must not go on.
            lines += ["Host *", *_read(path, _folder_of(path), 0)]
    return "\n".join(lines) + "\n"


def not_followed(settings: Mapping[str, object]) -> list[str]:
    """Returns what a host's settings ask for and nobody here does, as `Keyword value`.

    Args:
        settings: ssh_config settings of one host, by keyword in lower case.
    """
    asked = {name: str(settings.get(name.lower(), "")).strip() for name in _NOT_FOLLOWED}
    return [f"{name} {value}" for name, value in asked.items() if value and value.lower() not in _NOT_FOLLOWED[name]]


def _read(path: Path, folder: Path, depth: int) -> list[str]:
    lines: list[str] = []
    section = "Host *"
    for line in path.read_text(errors="surrogateescape").splitlines():
        found = _LINE.match(line)
        keyword, value = (found[1].lower(), found[2]) if found else ("", "")
        if keyword in ("host", "match"):
            section = line
        if keyword != "include":
            lines.append(line)
            continue
        included = _read_all(value, folder, depth)
        is_sectioned = any(re.match(r"\s*(host|match)\b", other, re.IGNORECASE) for other in included)
        if is_sectioned and " ".join(section.lower().split()) not in _ANY_HOST:
            # Found by `not_followed`, for the hosts of this section.
            lines.append(line)
        else:
            lines += [*included, *([section] if is_sectioned else [])]
    return lines


def _read_all(value: str, folder: Path, depth: int) -> list[str]:
    if depth >= _MAX_DEPTH:
        raise OSError(f"files include each other more than {_MAX_DEPTH} deep: {value}")
    lines: list[str] = []
    for word in shlex.split(value, comments=True):
        pattern = os.path.join(folder, os.path.expanduser(word))
        for path in sorted(glob.glob(pattern)):
            lines += _read(Path(path), folder, depth + 1)
    return lines


def _folder_of(path: Path) -> Path:
    """Returns where a file's relative `Include`s are: ssh knows two places, whatever file it was told to read."""
    system = Path(CONFIGS[1])
    return system.parent if path == system else Path(CONFIGS[0]).expanduser().parent
