"""Tensors as safetensors files have them: dtypes by name, headers, and the bytes of values without a copy.

The library's own writer takes a dict of whole tensors and makes a second copy of each; here views go to a file as they
are, and any tool that reads safetensors opens the result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsrun.checkpoint_files.tensors.header import header_bytes
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
