"""One rank's file of a checkpoint: the safetensors format, written without a copy of the state.

The library's own writer takes a dict of whole tensors and makes a second copy of each; here views go to the file as
they are. Any tool that reads safetensors opens the result.
Source: the format as its README specifies it: 8 bytes little-endian length, JSON header, data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsrun.checkpoint_files.tensor_header import header_bytes
from dsrun.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


#: Bytes that are made durable at a time: a slow disk then shows progress, where one flush of everything would not.
SYNC_BYTES = 256 << 20


def write_tensor_file(
    path: Path,
    entries: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Writes `entries` to a new file and makes it durable (fsync).

    Args:
        path: the file; it must not exist.
        entries: contiguous tensors by key, on any device; CUDA tensors are copied to the host one at a time.
        metadata: the header's free part.
        progress: called after each entry, and whenever `SYNC_BYTES` more are durable.

    Raises:
        CheckpointError: the format has no name for a tensor's dtype.
        OSError: the file cannot be written; nothing is left of it.
    """
    text, _ = header_of(entries, metadata)
    with path.open("xb") as file:
        try:
            file.write(text)
            unsynced = 0
            for tensor in entries.values():
                data = bytes_of(tensor)
                for start in range(0, len(data), SYNC_BYTES):
                    unsynced += file.write(data[start : start + SYNC_BYTES])
                    if unsynced >= SYNC_BYTES:
                        file.flush()
                        os.fdatasync(file.fileno())
                        unsynced = 0
                    progress()
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def header_of(entries: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Returns what stands before the data, with its length, and the bytes [first, last) of the file each entry has.

    Args:
        entries: tensors by key; only shapes and dtypes are read.
        metadata: the header's free part.

    Raises:
        CheckpointError: the format has no name for a tensor's dtype.
    """
    named = {key: (dtype_name(tensor, key), tuple(tensor.shape)) for key, tensor in entries.items()}
    return header_bytes(named, metadata)


def dtype_name(tensor: Tensor, key: str) -> str:
    """Returns a tensor's dtype as safetensors names it.

    Raises:
        CheckpointError: the format has no name for it.
    """
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"`{key}` is {tensor.dtype}, which safetensors files cannot hold")
    return _NAMES[tensor.dtype]


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype that safetensors gives a name.

    Raises:
        CheckpointError: this version has none.
    """
    for dtype, known in _NAMES.items():
        if known == name:
            return dtype
    raise CheckpointError(f"dtype {name} is one that this version does not know")


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor, copied only if it is not on the CPU."""
    flat = tensor.detach().contiguous().cpu().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
