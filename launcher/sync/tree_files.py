"""Which files belong to a working folder: what git would commit, or, outside of git, all but what tools leave behind.

Reads names only, not contents; goes through no symbolic link. Standard library only, for it also runs on hosts.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from dsrun.errors import UsageError

from ..excerpts import listed

#: Made by tools, from files that are there or for this machine alone; never part of a tree, in git or out of it.
LEFT_OUT = frozenset(
    {
        *(".git", ".hg", ".svn", "__pycache__", ".venv", "node_modules", ".tox", ".nox", ".eggs"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".ipynb_checkpoints"),
    }
)
#: Marks the folder of a virtual environment, which is made of paths of its own machine.
_VENV_MARK = "pyvenv.cfg"
_GIT_PATIENCE_S = 60.0
#: A listing that has grown to this is no working folder; the bounds of who asked are lower.
_MOST_NAMES = 1_000_000


@dataclass(frozen=True, slots=True)
class TreeFiles:
    """Names of a tree.

    Attributes:
        paths: relative, sorted; of files and symbolic links.
        notes: remarks in words about things that a user may not expect.
    """

    paths: tuple[str, ...]
    notes: tuple[str, ...] = ()


def list_files(folder: str) -> TreeFiles:
    """Lists a working folder's files.

    Args:
        folder: absolute path.

    Raises:
        UsageError: it is no folder, cannot be read, or git refuses it.
    """
    if not os.path.isdir(folder):
        raise UsageError(f"working folder {folder}: there is no such folder")
    notes: list[str] = []
    paths = _listed_by_git(folder, notes)
    if not paths:
        # Also a folder that a repository around it ignores as a whole, like one in a home that is kept in git.
        paths = list(_walk(folder))
    # In a merge git names a file once for each side.
    kinds = {path: _kind(folder, path) for path in _without_links(folder, _without_left_out(paths))}
    special = sorted(path for path, kind in kinds.items() if kind == "special")
    if special:
        notes.append(f"left out, being no file: {listed(special)}")
    return TreeFiles(tuple(sorted(path for path, kind in kinds.items() if kind in ("file", "link"))), tuple(notes))


def _listed_by_git(folder: str, notes: list[str]) -> list[str] | None:
    """Asks git, also about repositories within; None where it has nothing to say."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    # Of a hook that runs us, they would be about its repository. Messages are matched below.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_PATIENCE_S
        )
    except FileNotFoundError:
        if _is_in_repository(folder):
            notes.append(f"git is not installed, so that what .gitignore leaves out counts as part of {folder}")
        return None
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"working folder {folder}: git has not listed it in {_GIT_PATIENCE_S:g} s") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        if "not a git repository" in said:
            return None
        first = said.splitlines()[0] if said else f"git ended with status {done.returncode}"
        hint = None
        if "dubious ownership" in said:
            hint = f"it belongs to somebody else; if you trust it: git config --global --add safe.directory {folder}"
        raise UsageError(f"working folder {folder}: git does not list it: {first}", hint=hint)
    names: list[str] = []
    for path in map(os.fsdecode, filter(None, done.stdout.split(b"\0"))):
        inner = path.rstrip("/")
        if _kind(folder, inner) == "folder":
            # A submodule, or a repository that was put there; git names the folder and leaves the rest to it.
            below = os.path.join(folder, inner)
            if os.path.lexists(os.path.join(below, ".git")):
                names += [f"{inner}/{name}" for name in _listed_by_git(below, notes) or _walk(below)]
        else:
            names.append(path)
    return names


def _is_in_repository(folder: str) -> bool:
    while not os.path.lexists(os.path.join(folder, ".git")):
        above = os.path.dirname(folder)
        if above == folder:
            return False
        folder = above
    return True


def _walk(folder: str) -> Iterator[str]:
    """Yields what is below a folder, as paths relative to it."""

    def refuse(error: OSError) -> None:
        raise UsageError(f"{os.fsdecode(error.filename)}: cannot read this folder: {error.strerror}") from error

    count = 0
    for root, folders, files in os.walk(folder, onerror=refuse):
        base = os.path.relpath(root, folder)
        folders[:] = [
            name
            for name in folders
            if name not in LEFT_OUT and not os.path.lexists(os.path.join(root, name, _VENV_MARK))
        ]
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        count += len(files) + len(links)
        if count > _MOST_NAMES:
            raise UsageError(
                f"working folder {folder}: holds more than {_MOST_NAMES:,} files", hint="is it the right one?"
            )
        for name in [*files, *links]:
            yield name if base == "." else f"{base}/{name}"


def _without_left_out(paths: list[str]) -> list[str]:
    venvs = {os.path.dirname(path) for path in paths if os.path.basename(path) == _VENV_MARK} - {""}

    def is_left_out(path: str) -> bool:
        *folders, name = path.split("/")
        if name in LEFT_OUT or not LEFT_OUT.isdisjoint(folders):
            return True
        return bool(venvs) and any("/".join(folders[: end + 1]) in venvs for end in range(len(folders)))

    return [path for path in paths if not is_left_out(path)]


def _without_links(folder: str, paths: list[str]) -> list[str]:
    """Drops what git knows in a folder that has become a link: it lies elsewhere now, if anywhere."""
    is_real = {"": True}

    def is_below(parent: str) -> bool:
        if parent not in is_real:
            is_real[parent] = is_below(os.path.dirname(parent)) and not os.path.islink(os.path.join(folder, parent))
        return is_real[parent]

    return [path for path in paths if is_below(os.path.dirname(path))]


def _kind(folder: str, path: str) -> str:
    """`file`, `link`, `folder`, `special`, or `missing`, as is a file that git knows and somebody has deleted."""
    try:
        mode = os.lstat(os.path.join(folder, path)).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        raise UsageError(f"{os.path.join(folder, path)}: cannot read it: {error.strerror}") from error
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISLNK(mode):
        return "link"
    return "folder" if stat.S_ISDIR(mode) else "special"
