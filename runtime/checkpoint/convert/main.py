"""`python -m dsrun.runtime.checkpoint.convert.main`: another tool's checkpoint into one of dsrun's.

A process of its own, for the launcher has no torch. What goes wrong is said on stderr as the launcher words it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dsrun.checkpoint_files.storage.deepspeed_tags import LATEST_UNIVERSAL_FILE, MODEL_STATES
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import place_of
from dsrun.checkpoint_files.storage.tags import LATEST_FILE
from dsrun.errors import CheckpointError, DsrunError, InputError
from dsrun.files.regular import read_regular
from dsrun.units import format_bytes

from .dcp import METADATA, read_dcp
from .deepspeed import read_deepspeed
from .foreign import ForeignCheckpoint
from .write import write

_LATEST = (LATEST_UNIVERSAL_FILE, LATEST_FILE)
_MOST_LATEST = 300


def main() -> int:
    """Imports, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="import_main", allow_abbrev=False)
    parser.add_argument("source", type=Path)
    parser.add_argument("out")
    parser.add_argument("--tag")
    parser.add_argument("--trust-pickle", action="store_true")
    parser.add_argument("--ignore", action="append", default=[])
    parser.add_argument("--optimizer")
    parser.add_argument("--buffer", action="append", default=[])
    words = parser.parse_args()
    try:
        target, nbytes = import_checkpoint(
            words.source,
            place_of(words.out),
            tag=words.tag,
            trust_pickle=words.trust_pickle,
            ignored=words.ignore,
            optimizer=words.optimizer,
            buffers=words.buffer,
        )
    except DsrunError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or words.out}: {error.strerror or error}", file=sys.stderr)
        return DsrunError.exit_code
    print(f"{target}  {format_bytes(nbytes)}")
    return 0


def import_checkpoint(
    source: Path,
    out: Place,
    *,
    tag: str | None,
    trust_pickle: bool,
    ignored: list[str],
    optimizer: str | None,
    buffers: list[str],
) -> tuple[Place, int]:
    """Reads a checkpoint and writes it as one of dsrun's; returns its folder and its bytes.

    Args:
        source: a tag's folder, or the one that has a `latest`.
        out: folder of dsrun's checkpoints.
        tag: name of the new one; None: `global_step<N>`.
        trust_pickle: whether pickles may be read at all.
        ignored: names in the checkpoint's pickles that are read as inert placeholders instead of being refused.
        optimizer: name of the optimizer's class, where the files do not say, or say something else.
        buffers: names of the tensors that are buffers, for a checkpoint of torch.distributed.checkpoint.

    Raises:
        InputError: pickles may not be read.
        CheckpointError: there is nothing to import, it is damaged, or the tag is there already.
        OSError: it cannot be written.
    """
    folder = tag_of(source)
    if not trust_pickle:
        raise InputError(
            f"{folder}: its files are pickles, which may be made to run anything by who reads them carelessly",
            hint="if it comes from where you trust, pass --trust-pickle: then it is read by torch's restricted "
            "reader, and what that would not read is refused by name",
        )
    found = _read(folder, ignored, buffers)
    if optimizer is not None:
        found.optimizer = optimizer
    if found.scheduler is not None and found.scheduler["type"] is None:
        found.scheduler = None
        found.left.append("the schedule: the config does not say which one it is")
    name = f"global_step{found.counters.get('global_steps', 0)}" if tag is None else tag
    nbytes = write(found, out, name)
    for text in found.left:
        print(f"dsrun: not taken over: {text}", file=sys.stderr)
    return out / name, nbytes


def tag_of(source: Path) -> Path:
    """Returns the folder that holds the files: `source`, or the one that its `latest` names.

    Raises:
        CheckpointError: neither does.
    """
    if _is_deepspeed(source) or (source / METADATA).is_file():
        return source
    for name in _LATEST:
        path = source / name
        if path.exists():
            try:
                text = read_regular(path, _MOST_LATEST).decode("utf-8", "replace").strip()
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            if Path(text).name == text and _is_deepspeed(source / text):
                return source / text
            raise CheckpointError(f"{path}: it names {text!r}, which is no checkpoint of DeepSpeed's here")
    raise CheckpointError(
        f"{source}: there is no checkpoint here that can be imported",
        hint="name a folder of DeepSpeed's with `latest`, or a tag's with *model_states.pt, or torch's with .metadata",
    )


def _is_deepspeed(folder: Path) -> bool:
    return any(folder.glob(MODEL_STATES))


def _read(folder: Path, ignored: list[str], buffers: list[str]) -> ForeignCheckpoint:
    if (folder / METADATA).is_file():
        return read_dcp(folder, ignored=ignored, buffers=buffers)
    return read_deepspeed(folder, ignored=ignored)


if __name__ == "__main__":
    sys.exit(main())
