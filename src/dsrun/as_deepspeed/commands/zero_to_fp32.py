"""`zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR`: a checkpoint's weights in fp32, as files that others load.

The words are those of DeepSpeed's script of this name. The files are written by `dsrun checkpoint export`'s own code.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsrun.checkpoint_files.folder.find import find_tag
from dsrun.checkpoint_files.folder.removal import held
from dsrun.checkpoint_files.index.value import Index
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import place_of
from dsrun.checkpoint_files.tensors.header import read_header
from dsrun.checkpoint_files.tensors.rounding import FLOATS
from dsrun.checkpoint_files.verbs.export import export
from dsrun.errors import CheckpointError, DsrunError, UsageError
from dsrun.files.atomic import write_atomic
from dsrun.launcher.options.types import parse_size
from dsrun.units import format_bytes

_TORCH = "pytorch_model"
_SAFE = "model"


def main(args: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code.

    Args:
        args: words after the script's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Write a checkpoint's weights in fp32.")
    parser.add_argument("checkpoint_dir", help="folder with `latest`, or that of one checkpoint in it")
    parser.add_argument("output_dir", type=Path, help="folder to write the files to")
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="of a file, like 500MB [%(default)s]")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors files, not torch's")
    parser.add_argument("-t", "--tag", help="which checkpoint of the folder, like global_step1 [what `latest` names]")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what is not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    given = parser.parse_args(args)
    try:
        files = write_weights(
            place_of(given.checkpoint_dir if given.tag is None else f"{given.checkpoint_dir}/{given.tag}"),
            given.output_dir,
            shard_bytes=_size(given.max_shard_size),
            as_safetensors=given.safe_serialization,
            frozen=not given.exclude_frozen_parameters,
        )
    except DsrunError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or given.output_dir}: {error.strerror or error}", file=sys.stderr)
        return DsrunError.exit_code
    for file in files:
        print(f"{file}  {format_bytes(file.stat().st_size)}")
    return 0


def write_weights(
    source: Place, out: Path, *, shard_bytes: int, as_safetensors: bool = False, frozen: bool = True
) -> list[Path]:
    """Writes the parameters and buffers of a checkpoint; those with floating point in fp32. Memory is some blocks.

    Args:
        source: a tag's folder, or one of tags, whose latest is meant.
        out: folder, made if it is not there.
        shard_bytes: most bytes of tensors in one file, unless a single tensor has more.
        as_safetensors: whether safetensors files are written, and not torch's.
        frozen: whether parameters that are not trained are written.

    Returns:
        the files, without their index.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not say what is trained; or `out` holds a model.
        OSError: the file system refuses.
    """
    target = find_tag(source)
    with held(target):
        index = _as_fp32(read_index(target), frozen=frozen, target=target)
        if as_safetensors:
            return _export(target, index, out, shard_bytes)
        there = sorted(out.glob(f"{_TORCH}*.bin*"))
        if there:
            raise CheckpointError(f"{out}: a model is there already: {there[0].name}", hint="name another folder")
        out.mkdir(parents=True, exist_ok=True)
        between = Path(tempfile.mkdtemp(prefix=".zero_to_fp32.", dir=out))
        try:
            return _to_torch(_export(target, index, between, shard_bytes), index, out)
        finally:
            shutil.rmtree(between)


def _size(text: str) -> int:
    import click

    try:
        return parse_size(text)
    except click.BadParameter as error:
        raise UsageError(f"zero_to_fp32.py: `--max_shard_size`: {error.message}") from error


def _as_fp32(index: Index, *, frozen: bool, target: Place) -> Index:
    """Returns the index of what is written. Floating-point buffers become parameters, to be converted."""
    tensors = {
        (name, "param" if role == "buffer" and stored.dtype in FLOATS else role): stored
        for (name, role), stored in index.tensors.items()
        if role in ("param", "buffer") and (frozen or role == "buffer" or name in _trained(index, target))
    }
    names = {name for name, _ in tensors}
    aliases = {alias: name for alias, name in index.aliases.items() if name in names}
    return replace(index, tensors=tensors, aliases=aliases)


def _trained(index: Index, target: Place) -> set[str]:
    """Returns the names of the parameters that are trained: those with states of the optimizer, or without gradients.

    Raises:
        CheckpointError: the optimizer has no states, and frozen parameters are not told from the others.
    """
    if not index.values.get("frozen", True):
        return {name for name, role in index.tensors if role == "param"}
    roles = index.state_roles()
    left_out: list[dict[str, Any]] = (index.values.get("optimizer") or {}).get("left_out") or []
    trained = {name for name, role in index.tensors if role in roles} | {n for one in left_out for n in one["names"]}
    if not trained:
        raise CheckpointError(
            f"{target}: it has no states of the optimizer, by which parameters that are trained are known",
            hint="leave `--exclude_frozen_parameters` out, or save with `exclude_frozen_parameters=True`",
        )
    return trained


def _export(target: Place, index: Index, out: Path, shard_bytes: int) -> list[Path]:
    return export(target, index, out, dtype="F32", shard_bytes=shard_bytes, calls=FileCalls())


def _to_torch(files: list[Path], index: Index, out: Path) -> list[Path]:
    """Writes each safetensors file as a torch file into `out`, with an index where there are several."""
    # Torch takes a second to import, and only this needs it.
    from dsrun.runtime.checkpoint.export.torch_file import to_torch_file

    weight_map: dict[str, str] = {}
    nbytes, made = 0, list[Path]()
    for file in files:
        path = out / f"{_TORCH}{file.stem.removeprefix(_SAFE)}.bin"
        to_torch_file(file, path)
        made.append(path)
        header = read_header(file)
        weight_map |= dict.fromkeys(header.entries, path.name)
        nbytes += sum(entry.last - entry.first for entry in header.entries.values())
    weight_map |= {alias: weight_map[name] for alias, name in index.aliases.items()}
    if len(files) > 1:
        body = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        write_atomic(out / f"{_TORCH}.bin.index.json", json.dumps(body, indent=2).encode())
    return made


if __name__ == "__main__":
    sys.exit(main())
