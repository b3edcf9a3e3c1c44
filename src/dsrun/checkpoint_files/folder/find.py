"""Which checkpoint a path means: a tag's own folder, or a folder of tags, of which the latest is meant."""

from __future__ import annotations

from pathlib import Path

from dsrun.errors import CheckpointError

from ..storage.deepspeed_tags import is_deepspeed_tag
from ..storage.places import Place
from ..storage.tags import latest_tag, tags_hint
from .listing import is_checkpoint, list_tags
from .own_saves import wait_for_own_saves


def find_tag(path: Place, *, of_deepspeed: bool = False) -> Place:
    """Returns the folder of the checkpoint that `path` means; waits for those that this job itself is still writing.

    Args:
        path: a tag's folder, or one of tags.
        of_deepspeed: whether a checkpoint that DeepSpeed saved may be meant, too.

    Raises:
        CheckpointError: it is neither, or no tag is the latest.
    """
    wait_for_own_saves(path)
    if is_checkpoint(path):
        return path
    if isinstance(path, Path) and path.is_symlink() and is_checkpoint(path.resolve()):
        return path.resolve()
    if of_deepspeed and is_deepspeed_tag(path):
        return path
    if isinstance(path, Path) and not path.is_dir():
        raise CheckpointError(f"{path}: no such folder{tags_hint(path.parent) if path.parent.is_dir() else ''}")
    if of_deepspeed and (latest := latest_tag(path, is_other=is_deepspeed_tag)) is not None:
        return path / latest
    if not list_tags(path):
        raise CheckpointError(
            f"{path}: there is no checkpoint here", hint="name a folder of checkpoints, or one of them"
        )
    latest = latest_tag(path)
    if latest is None:
        raise CheckpointError(f"{path}: no `latest` says which one is meant{tags_hint(path)}", hint="name a tag's")
    return path / latest
