"""Which checkpoint a call of `load_checkpoint` means. Nothing is loaded here."""

from __future__ import annotations

import os
from pathlib import Path

from dsrun.checkpoint_files.folder.listing import list_tags
from dsrun.checkpoint_files.storage.deepspeed_tags import LATEST_UNIVERSAL_FILE, is_deepspeed_tag
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import place_given
from dsrun.checkpoint_files.storage.tags import latest_tag, tag_to_load
from dsrun.errors import CheckpointError, InputError


def choose_checkpoint(
    load_dir: Place | None,
    tag: str | None,
    *,
    resume: Place | None,
    missing_ok: bool,
    universal: bool = False,
) -> Place | None:
    """Returns the tag folder to load: the tag asked for, else the one to go on from, else the one `latest` names.

    It may be one that DeepSpeed saved, which is not dsrun's to load everywhere.

    Args:
        load_dir: checkpoint folder; None: the one that `resume` lies in.
        tag: name inside it.
        resume: checkpoint that a restarted job goes on from; None in other jobs. Ignored if it lies outside of
            `load_dir`, as where a script loads a base model first.
        missing_ok: return None where there is no checkpoint yet.
        universal: whether `latest_universal`, where it is there, counts instead of `latest`.

    Raises:
        InputError: there is nothing to choose by.
        CheckpointError: `load_dir` holds no such checkpoint.
    """
    if load_dir is None:
        if tag is not None:
            raise InputError(f"load_checkpoint: tag is {tag!r}, and there is no load_dir", hint="pass load_dir=")
        if resume is None and not missing_ok:
            raise InputError(
                "load_checkpoint: there is no load_dir, and this job was not started again",
                hint="pass load_dir=, or missing_ok=True to start from scratch the first time",
            )
        return resume
    if tag is not None:
        return tag_to_load(load_dir, tag)
    if resume is not None and _lies_in(resume, load_dir):
        return resume
    latest = latest_tag(load_dir, file=LATEST_UNIVERSAL_FILE, is_other=is_deepspeed_tag) if universal else None
    if latest is None:
        latest = latest_tag(load_dir, is_other=is_deepspeed_tag)
    if latest is None and not missing_ok:
        raise CheckpointError(
            f"{load_dir}: no checkpoint here: there is no file `latest`",
            hint="check the folder, pass tag=, or pass missing_ok=True to start from scratch",
        )
    return None if latest is None else tag_to_load(load_dir, latest)


def what_lacks(load_dir: str | os.PathLike[str] | None) -> str:
    """Returns why there is nothing to load, for a script that goes on without: complete tags are named.

    Args:
        load_dir: checkpoint folder or address, as the script gave it; None where it gave none.
    """
    if load_dir is None:
        return "there is no load_dir, and this job was not started again"
    folder = place_given(load_dir, who="load_checkpoint: load_dir", to="load from")
    if isinstance(folder, Path) and not folder.is_dir():
        return f"there is no folder {load_dir} yet"
    tags = [tag.name for tag in list_tags(folder)]
    if not tags:
        return f"there is no checkpoint in {load_dir} yet"
    return f"{load_dir} has no file `latest`, and holds {', '.join(tags)} (`tag=` loads one)"


def _lies_in(target: Place, folder: Place) -> bool:
    if isinstance(target, Path) and isinstance(folder, Path):
        return target.parent.resolve() == folder.resolve()
    return target.parent == folder
