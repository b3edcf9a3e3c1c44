"""Taking checkpoints away: only what is one, never through a link, and `latest` never names what is gone."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from dsrun.errors import CheckpointError, Problem

from ..storage.calls import FileCalls
from ..storage.places import Place, Storage, small_content
from ..storage.registry import storage_of
from ..storage.tags import LATEST_FILE
from .listing import Tag, TagState, is_checkpoint, list_tags, named_by_latest
from .removal import remove_tag


def check_removable(paths: Sequence[Place]) -> None:
    """Refuses what is no checkpoint, before anything is removed.

    Raises:
        CheckpointError: naming every path that is none, or a link.
    """
    problems: list[Problem] = []
    for path in paths:
        if isinstance(path, Path) and path.is_symlink():
            problems.append(Problem(f"{path}: it is a link to {os.readlink(path)}", "remove the link itself with `rm`"))
        elif not is_checkpoint(path):
            problems.append(
                Problem(f"{path}: it is no checkpoint of dsrun", "see `dsrun checkpoint ls` for those there are")
            )
    if problems:
        raise CheckpointError.of(problems)


def outnumbered(tags: Sequence[Tag], keep_last: int) -> list[Tag]:
    """Returns what goes where the newest complete checkpoints are kept: older ones, and torn ones older than these.

    The one that `latest` names stays. What is torn and newer than every complete one may be a save under way.

    Args:
        tags: oldest first.
        keep_last: number of the newest complete checkpoints to keep.
    """
    complete = [tag for tag in tags if tag.state is TagState.COMPLETE]
    kept = complete[max(0, len(complete) - keep_last) :]
    if not kept:
        return []
    return [tag for tag in tags if tag.saved <= kept[0].saved and tag not in kept and not tag.is_latest]


def remove(folder: Place, names: Collection[str], *, calls: FileCalls) -> str | None:
    """Removes tags of one folder; `latest` names the newest complete one that is left before they go.

    Args:
        folder: folder of the checkpoints.
        names: names of the tags to remove; see `check_removable`.
        calls: the file system.

    Returns:
        what `latest` was changed to; None where it stays as it is, "" where there is none any more.

    Raises:
        CheckpointError: files that are not dsrun's are left in a tag's folder, or somebody is reading or saving it.
        OSError: the file system refuses.
    """
    storage = storage_of(folder, calls)
    changed: str | None = None
    if named_by_latest(folder) in names:
        left = [tag for tag in list_tags(folder) if tag.state is TagState.COMPLETE and tag.name not in names]
        changed = left[-1].name if left else ""
        if left:
            storage.write(folder / LATEST_FILE, small_content(changed.encode()), over=f"rm{os.getpid()}")
        else:
            storage.remove([folder / LATEST_FILE])
    problems: list[Problem] = []
    for name in sorted(names):
        reason = remove_tag(folder / name, calls=calls)
        if reason is not None:
            problems.append(Problem(f"{folder / name}: it stays: {reason}", "remove it again when that has ended"))
            continue
        left = _left(storage, folder / name)
        if left is not None:
            strange = ", ".join(left[:5])
            problems.append(
                Problem(
                    f"{folder / name}: no checkpoint any more, but files are left that are not its own, or that a "
                    f"save is writing now: {strange}"
                )
            )
    if problems:
        raise CheckpointError.of(problems)
    return changed


def _left(storage: Storage, target: Place) -> list[str] | None:
    """Returns what is left in a tag's folder; None where it is gone."""
    try:
        return sorted(entry.name for entry in storage.list(target))
    except FileNotFoundError:
        return None
