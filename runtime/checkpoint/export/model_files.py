"""A model's weights as files for other programs, written tensor by tensor: one file, or shards with an index.

Names and index are those that Hugging Face's loaders look for: `model-00001-of-00003.safetensors`, and which tensor is
in which file in `model.safetensors.index.json`. Files get their names when all of them are complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from dsrun.errors import CheckpointError
from dsrun.files.atomic import sync_folder, write_atomic

from .streamed_file import StreamedFile

_METADATA = {"format": "pt"}  # as transformers asks of a file


class StreamedModel:
    """Files under way to their names. After an error nothing more is written, and `finish` raises it: whoever writes
    may have to go on with other ranks in between.

    Args:
        path: path of the file if there is only one; the names of shards are made from it.
        named: tensors by name; only shapes and dtypes are read here.
        shard_bytes: most bytes of tensors in one file, unless a single tensor has more; None for one file.
        aliases: further names of tied tensors to the names in `named`; a file's free part leads from them to its own.
    """

    def __init__(
        self,
        path: Path,
        named: Mapping[str, Tensor],
        *,
        shard_bytes: int | None = None,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._path = path
        self._total_bytes = sum(map(_size, named.values()))
        self._error: Exception | None = None
        self._files: dict[str, StreamedFile] = {}
        self._file_of: dict[str, str] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shards = cut(named, shard_bytes)
            for number, names in enumerate(shards, start=1):
                file = path.name
                if len(shards) > 1:
                    file = f"{path.stem}-{number:05}-of-{len(shards):05}{path.suffix}"
                entries = {name: named[name] for name in names}
                tied = {alias: name for alias, name in aliases.items() if name in entries}
                self._files[file] = StreamedFile(self._unfinished(file), entries, metadata=tied | _METADATA)
                self._file_of.update(dict.fromkeys(names, file))
        except (OSError, CheckpointError) as error:
            self._error = error

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, unless there was an error."""
        if self._error is None:
            try:
                self._files[self._file_of[name]].put(name, tensor)
            except OSError as error:
                self._error = error

    def finish(self) -> None:
        """Gives the files their names, and takes away what was saved as one file before and now as shards, or so.

        Raises:
            CheckpointError: what has gone wrong since the beginning.
            OSError: likewise.
        """
        try:
            if self._error is not None:
                raise self._error
            for file in self._files.values():
                file.finish()
            for name in self._files:
                os.replace(self._unfinished(name), self._path.with_name(name))
        except BaseException:
            self.abandon()
            raise
        index = self._path.with_name(f"{self._path.name}.index.json")
        if len(self._files) > 1:
            metadata = {"total_size": self._total_bytes}
            write_atomic(index, json.dumps({"metadata": metadata, "weight_map": self._file_of}, indent=2).encode())
        # Loaders look for either, so a stale one would be taken for this one.
        (self._path if len(self._files) > 1 else index).unlink(missing_ok=True)
        sync_folder(self._path.parent)

    def abandon(self) -> None:
        """Leaves nothing behind that has no name yet."""
        for file in self._files.values():
            file.abandon()

    def _unfinished(self, name: str) -> Path:
        return self._path.with_name(f".{name}.{os.getpid()}")


def cut(named: Mapping[str, Tensor], shard_bytes: int | None) -> list[list[str]]:
    """Returns the names of the tensors in each file, in order; at least one file."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in named.items():
        if room is not None and shard_bytes is not None:
            if _size(tensor) > room and shards[-1]:
                shards.append([])
                room = shard_bytes
            room = max(0, room - _size(tensor))
        shards[-1].append(name)
    return shards


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
