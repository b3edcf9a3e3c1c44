"""`.deepspeed_env`: variables that ranks of all hosts get. Read as DeepSpeed and accelerate write it; sets nothing.

    line := "" | "#" any | ["export "] NAME "=" VALUE       a later line wins; one pair of quotes around a value is none

accelerate appends all of its environment to the file at each launch. So a name may stand there many times, and among
them are those that are dsrun's to set, which are left out. A hand-written file for `--env-file` is held to more.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from dsrun.errors import Problem, UsageError
from dsrun.launcher.plan.environment import instead_of

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What the shell that DeepSpeed starts would put something else for.
_EXPANSION = re.compile(r"`|\$[A-Za-z0-9_({]")
_MAX_BYTES = 1 << 20


def exported_files(name: str, *, home: Path, folder: Path) -> list[Path]:
    """Returns the files that are there, the one that counts last.

    Args:
        name: name of the file, or its path.
        home: home of the user.
        folder: working folder.
    """
    paths = dict.fromkeys((home / name, folder / name))
    return [path for path in paths if path.is_file()]


def read_exported(paths: Sequence[Path]) -> tuple[dict[str, str], list[str]]:
    """Reads files of variables.

    Args:
        paths: files in order; a later value wins.

    Returns:
        values by name, and the names that are left out because they are dsrun's to set.

    Raises:
        UsageError: carries every line that is not understood, and files that others can write.
    """
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for path in paths:
        for number, line in enumerate(_lines(path), start=1):
            found = _assignment(line.strip(), f"{path}:{number}")
            if isinstance(found, Problem):
                problems.append(found)
            elif found is not None:
                values[found[0]] = found[1]
    if problems:
        raise UsageError.of(problems)
    ours = [name for name in values if name.startswith("DSRUN_") or instead_of(name) is not None]
    return {name: value for name, value in values.items() if name not in ours}, ours


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot read this file of variables: {error.strerror}") from error
    # Who can write it can have the ranks run anything, by LD_PRELOAD. Not so for the user's group: accelerate makes the
    # file with the umask of the user, and who has one of 002 has scripts that the group can write, too.
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{path}: others than you can write this file, and so set any variable of your ranks",
            hint=f"remove it, or `chmod o-w {path}` as its owner; DS_ENV_FILE names another",
        )
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path}: a file of variables is smaller than 1 MiB", hint="remove it: it is appended to")
    return data.decode("utf-8", "surrogateescape").split("\n")


def _assignment(line: str, where: str) -> tuple[str, str] | Problem | None:
    if not line or line.startswith("#"):
        return None
    name, equals, value = line.removeprefix("export ").partition("=")
    name, value = name.strip(), value.strip()
    if not equals or _NAME.fullmatch(name) is None:
        # The line itself may be secret.
        return Problem(f"{where}: this is no variable", "a line reads `NAME=value`")
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        if value[0] == "'":
            return name, value[1:-1]
        value = value[1:-1]
    if _EXPANSION.search(value) is not None:
        return Problem(
            f"{where}: the value of `{name}` has what a shell would expand, and no shell reads it",
            "put it in single quotes if it is meant as it stands, or write what it stands for",
        )
    return name, value
