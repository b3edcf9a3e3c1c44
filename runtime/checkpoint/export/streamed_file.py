"""A safetensors file whose tensors come one by one, in any order, so that its writer never holds them all.

Where each of them stands follows from shapes and dtypes, which are known before any value is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dsrun.checkpoint_files.storage.calls import naming

from ..format.tensor_file import SYNC_BYTES, bytes_of, header_of


class StreamedFile:
    """A new file of the right size, with its header; `put` each tensor, then `finish`, or `abandon` it.

    Args:
        path: the file; it must not exist.
        entries: tensors by key; only shapes and dtypes are read here.
        metadata: the header's free part.

    Raises:
        CheckpointError: the format has no name for a tensor's dtype.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, entries: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
        text, self._places = header_of(entries, metadata)
        self._missing = set(entries)
        self._unsynced = 0
        self._path = path
        self._file = path.open("xb", buffering=0)
        try:
            self._write(memoryview(text), 0)
        except OSError:
            self.abandon()
            raise

    def put(self, key: str, tensor: Tensor) -> None:
        """Writes one tensor, on any device, of the shape and dtype that were said.

        Raises:
            OSError: it cannot be written.
        """
        data = bytes_of(tensor)
        first, last = self._places[key]
        assert len(data) == last - first, f"`{key}` has {len(data)} bytes and was to have {last - first}"
        for start in range(0, len(data), SYNC_BYTES):
            part = data[start : start + SYNC_BYTES]
            self._write(part, first + start)
            self._unsynced += len(part)
            if self._unsynced >= SYNC_BYTES:
                with naming(self._path):
                    os.fdatasync(self._file.fileno())
                self._unsynced = 0
        self._missing.remove(key)

    def finish(self) -> None:
        """Makes the file durable (fsync) and closes it.

        Raises:
            OSError: the disk refuses.
        """
        assert not self._missing, f"{len(self._missing)} tensors were not put, `{min(self._missing)}` for one"
        with naming(self._path):
            os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Closes the file and removes it."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write(self, data: memoryview, position: int) -> None:
        while data:
            with naming(self._path):
                count = os.pwrite(self._file.fileno(), data, position)
            data, position = data[count:], position + count
