"""The folder of a run's checkpoints: names that may be tags, which tags there are, and which one is the latest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from dsrun.errors import CheckpointError
from dsrun.files.regular import read_regular

from ..index.value import INDEX_FILE
from .places import ASKED_AT_ONCE, Address, Entry, Place, read_range
from .registry import storage_of

LATEST_FILE = "latest"
_MOST_LATEST = 300
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,254}")


def is_plain_name(name: str) -> bool:
    """Whether a text may name a file of a tag: it cannot leave the folder, and is not hidden."""
    return _FILE.fullmatch(name) is not None


def check_tag(tag: str) -> str:
    """Returns `tag` if it is one plain folder name.

    Raises:
        CheckpointError: it is empty, too long, or could leave the checkpoint folder.
    """
    if not _NAME.fullmatch(tag) or tag == LATEST_FILE:
        shown = tag if len(tag) <= 80 else f"{tag[:80]}..."
        raise CheckpointError(
            f"checkpoint tag is {shown!r}; expected 1 to 200 letters, digits, `_`, `.`, `+`, `=` or `-`, "
            f"not starting with a dot or dash, and not `{LATEST_FILE}`",
        )
    return tag


def why_not_saved_to(folder: Path) -> str | None:
    """Returns why a folder, which may be missing, cannot be made or written to, as far as that shows; makes nothing."""
    there = next(place for place in (folder, *folder.parents, Path()) if os.path.lexists(place))
    if not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written to"


def tag_to_save(folder: Place, tag: str) -> Place:
    """Returns the folder of a tag that is to be written.

    Raises:
        CheckpointError: `tag` is no tag, or a link: what it leads to is not this run's to write.
    """
    target = folder / check_tag(tag)
    if isinstance(target, Path) and target.is_symlink():
        raise CheckpointError(
            f"{target}: it is a link to {os.readlink(target)}, which is not written through",
            hint="take the link away, or save under another tag",
        )
    return target


def tag_to_load(folder: Place, tag: str) -> Place:
    """Returns the folder of a tag that is to be read.

    Raises:
        CheckpointError: `tag` is no tag, or a link that leaves the checkpoint folder.
    """
    target = folder / check_tag(tag)
    if not isinstance(target, Path) or not isinstance(folder, Path):
        return target
    if target.is_symlink() and target.resolve().parent != folder.resolve():
        raise CheckpointError(
            f"{target}: it is a link that leaves {folder}", hint="pass the folder it leads to as load_dir"
        )
    return target


def latest_tag(
    folder: Place, *, file: str = LATEST_FILE, is_other: Callable[[Place], bool] = lambda target: False
) -> str | None:
    """Returns the tag that `latest` names, or None where there is no `latest`.

    Args:
        folder: folder of a run's checkpoints.
        file: name of the file that names the tag.
        is_other: function that says whether a folder is a checkpoint of another tool's, which may be named too.

    Raises:
        CheckpointError: `latest` names no checkpoint; the message lists the tags there are.
    """
    path = folder / file
    try:
        text = read_latest(folder, file=file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}{tags_hint(folder)}", hint="pass tag=") from error
    if not _NAME.fullmatch(text) or not (is_complete(folder / text) or is_other(folder / text)):
        raise CheckpointError(
            f"{path}: it names {text!r}, which is no complete checkpoint{tags_hint(folder)}",
            hint="pass tag= with one of the tags there are",
        )
    return text


def read_latest(folder: Place, *, file: str = LATEST_FILE) -> str:
    """Returns what `latest` says, whether there is such a tag or not.

    Args:
        folder: folder of a run's checkpoints.
        file: name of the file in it.

    Raises:
        OSError: it cannot be read.
    """
    path = folder / file
    if isinstance(path, Path):
        data = read_regular(path, _MOST_LATEST)
    else:
        with storage_of(path).read(path) as stored:
            data = read_range(stored, 0, min(stored.nbytes, _MOST_LATEST))
    return data.decode("utf-8", "replace").strip()


def is_complete(target: Place) -> bool:
    """Whether a tag's folder has an index; what stands in its place is refused where it is read."""
    if isinstance(target, Path):
        return os.path.lexists(target / INDEX_FILE)
    try:
        with storage_of(target).read(target / INDEX_FILE):
            return True
    except FileNotFoundError:
        return False


def complete_tags(folder: Place) -> list[str]:
    """Returns the tags in `folder` that have an index, oldest first."""
    if not isinstance(folder, Path):
        return _complete_in_store(folder)
    found: list[tuple[int, str]] = []
    for path in folder.glob(f"*/{INDEX_FILE}"):
        try:
            found.append((path.stat().st_mtime_ns, path.parent.name))
        except FileNotFoundError:  # removed meanwhile
            continue
    return [name for _, name in sorted(found)]


def tags_hint(folder: Place) -> str:
    """Returns what a message says of the tags there are."""
    tags = complete_tags(folder)
    if not tags:
        return "; there is no complete tag here"
    more = f" and {len(tags) - 20} older ones" if len(tags) > 20 else ""
    return f"; complete tags here: {', '.join(tags[-20:])}{more}"


def _complete_in_store(folder: Address) -> list[str]:
    storage = storage_of(folder)

    def entries(place: Address) -> Sequence[Entry]:
        with suppress(FileNotFoundError):
            return storage.list(place)
        return ()

    names = [entry.name for entry in entries(folder) if entry.is_folder]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        tags = zip(names, pool.map(entries, [folder / name for name in names]), strict=True)
        found = [(entry.modified, name) for name, inside in tags for entry in inside if entry.name == INDEX_FILE]
    return [name for _, name in sorted(found)]
