"""A safetensors file as a torch file of one state dict, tied weights shared: `python -m ... FILE OUT`.

A process of its own, for it needs torch. The file is mapped and not read, so its pages come and go as torch writes.
"""

from __future__ import annotations

import mmap
import os
import sys
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dsrun.checkpoint_files.tensors.header import read_header
from dsrun.errors import DsrunError
from dsrun.files.atomic import sync_folder

from ..format.tensor_file import dtype_named


def main() -> int:
    """Converts, and returns the exit status; what is wrong goes to stderr as the launcher words it."""
    source, target = map(Path, sys.argv[1:3])
    try:
        to_torch_file(source, target)
    except OSError as error:
        print(f"error: {target}: cannot be written: {error}", file=sys.stderr)
        return DsrunError.exit_code
    except DsrunError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return 0


def to_torch_file(source: Path, target: Path) -> None:
    """Writes what `source` holds to `target`, which must not exist before.

    Args:
        source: a safetensors file; its metadata leads from further names to tensors.
        target: the torch file; appears when it is whole.

    Raises:
        CheckpointError: `source` cannot be read.
        OSError: `target` cannot be written, or is there already.
    """
    header = read_header(source)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        state: dict[str, Tensor] = {}
        for key, entry in header.entries.items():
            dtype, numel = dtype_named(entry.dtype), prod(entry.shape)
            if numel:  # a storage of its own each: torch writes whole storages
                state[key] = torch.frombuffer(pages, dtype=dtype, count=numel, offset=entry.first).view(entry.shape)
            else:
                state[key] = torch.empty(entry.shape, dtype=dtype)
        state |= {alias: state[name] for alias, name in header.metadata.items() if name in state}
        try:
            with unfinished.open("xb") as out:
                torch.save(state, out)
                out.flush()
                os.fsync(out.fileno())
            os.link(unfinished, target)  # in contrast to a rename, it replaces nothing
        finally:
            unfinished.unlink(missing_ok=True)
            state.clear()  # tensors that still look into the pages would not let them go
    sync_folder(target.parent)


if __name__ == "__main__":
    sys.exit(main())
