"""Puts the folder with `deepspeed` on the path of this process, and into the variables of those that it starts.

[Note: place on the path] A folder on the path, and no entry of `sys.modules`: scripts look for the package and for its
distribution's metadata, and start processes that do so too. It stands behind the script's own folder, as that is where
python looks first for modules of the script's, and before all else, an installed DeepSpeed among it. PYTHONPATH is read
when an interpreter starts: it is for the processes that this one starts.

[Note: another version] The metadata in `site` has one version. A user who wishes for another one gets a small folder
with that version's metadata, which is put before `site`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun.contract.environment import AS_DEEPSPEED_ENV, is_first_rank
from dsrun.errors import InputError

from .version import STANDARD, full_version, wanted_version

#: Folder that holds the package and its metadata.
SITE = str(Path(__file__).parent / "site")
#: Folder with DeepSpeed's commands, first in PATH.
BIN = str(Path(__file__).parent / "bin")
#: Interpreter that they run with; without it they take the first python3 in PATH.
PYTHON_ENV = "DSRUN_AS_DEEPSPEED_PYTHON"
#: The last parts of our folders' parents, whichever dsrun made them.
_PARENT = ("dsrun", "as_deepspeed")
#: Libraries that look for `deepspeed` when they are imported, and keep the answer.
_CLIENTS = ("accelerate", "transformers")


def install(*, position: int = 1) -> str:
    """Has `import deepspeed` give dsrun, in this process and in those that it starts. May be called again.

    Args:
        position: place on the path: behind the script's own folder, or 0 where that is not on the path.

    Returns:
        the version that dsrun stands for.

    Raises:
        InputError: another `deepspeed` is imported already, or no version can be told as the user wishes.
    """
    _refuse_imported()
    late = [] if AS_DEEPSPEED_ENV in os.environ else [name for name in _CLIENTS if name in sys.modules]
    version = wanted_version(os.environ)
    os.environ.update(variables(os.environ, version))
    place(version, position=position)
    if is_first_rank(os.environ):
        _warn_of_own(sys.path[:position])
        if late:
            _say(f"warning: {late[0]} was imported before deepspeed was dsrun and may not see it; install dsrun first")
    return version


def place(version: str, *, position: int | None = None) -> None:
    """Puts the folders on this process's path, in the place of those that are there.

    Args:
        version: version that dsrun stands for.
        position: place on the path; None: that of the folder that is there.
    """
    if position is None:
        position = next((at for at, entry in enumerate(sys.path) if _is_ours(entry)), 0)
    kept = [entry for entry in sys.path[:position] if not _is_ours(entry)]
    rest = [entry for entry in sys.path[position:] if not _is_ours(entry)]
    sys.path[:] = [*kept, *_folders(version, os.environ), *rest]


def variables(environ: Mapping[str, str], version: str) -> dict[str, str]:
    """Returns the variables by which `import deepspeed` gives dsrun in a process of this host.

    Args:
        environ: environment that the process would have without them.
        version: version that dsrun stands for.

    Raises:
        InputError: the folder with the version's metadata cannot be made.
    """
    paths = {"PYTHONPATH": (_folders(version, environ), ""), "PATH": ([BIN], os.defpath)}
    given = {name: _before(ours, environ.get(name) or usual) for name, (ours, usual) in paths.items()}
    return {**given, PYTHON_ENV: sys.executable, AS_DEEPSPEED_ENV: version}


def _before(ours: list[str], path: str) -> str:
    theirs = [entry for entry in path.split(os.pathsep) if not _is_ours(entry)] if path else []
    return os.pathsep.join([*ours, *theirs])


def is_our_file(path: str | None) -> bool:
    """Whether a module's file is one of the package that dsrun ships.

    Args:
        path: `__file__` of the module.
    """
    return path is not None and any(_is_ours(str(folder)) for folder in Path(path).parents)


def _is_ours(entry: str) -> bool:
    return Path(entry).parts[-3:-1] == _PARENT


def _folders(version: str, environ: Mapping[str, str]) -> list[str]:
    return [SITE] if version == STANDARD else [_metadata_folder(version, environ), SITE]


def _metadata_folder(version: str, environ: Mapping[str, str]) -> str:
    """Makes a folder with the metadata of another version, where it is not there. See [Note: another version]."""
    from dsrun.files.atomic import write_atomic
    from dsrun.files.private import make_private_folder

    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    own = Path(state) / "dsrun"
    folder = own / "as_deepspeed" / version
    there = folder / f"deepspeed-{version}.dist-info"
    text = Path(SITE, f"deepspeed-{STANDARD}.dist-info", "METADATA").read_text(encoding="utf-8")
    text = text.replace(f"Version: {full_version(STANDARD)}\n", f"Version: {full_version(version)}\n")
    try:
        make_private_folder(there, own=own)
        if not (there / "METADATA").is_file():
            write_atomic(there / "METADATA", text.encode())
    except OSError as error:
        raise InputError(
            f"deepspeed {version}: cannot write {there}: {error.strerror or error}",
            hint="set XDG_STATE_HOME to a folder that can be written to",
        ) from error
    return str(folder)


def _refuse_imported() -> None:
    if "deepspeed" not in sys.modules:
        return
    module: Any = sys.modules["deepspeed"]
    path: str | None = getattr(module, "__file__", None)
    if not is_our_file(path):
        raise InputError(
            f"another deepspeed is imported already, from {path or 'no file'}",
            hint="start the script with `dsrun --as-deepspeed`, or import dsrun.as_deepspeed.install before all else",
        )


def _warn_of_own(folders: list[str]) -> None:
    """Says where the script's own folder has a module of that name, which is found first."""
    for folder in folders:
        for name in ("deepspeed.py", os.path.join("deepspeed", "__init__.py")):
            path = os.path.join(folder or os.getcwd(), name)
            if os.path.isfile(path):
                _say(f"warning: {path} is what `import deepspeed` gives here, and not dsrun; give it another name")


def _say(line: str) -> None:
    print(f"dsrun: {line}", file=sys.stderr, flush=True)
