"""Copies of ranks' states in a host's memory: files in a folder of shared memory, which count by a label each.

    <folder>/rank-00003.0          bytes of a safetensors file, as a checkpoint's; generation 0 or 1
    <folder>/rank-00003.0.json     its label, written last, by rename

No rank and no process is needed for them to stay, and nothing of a disk. Moves nothing between ranks, and decides
nothing: what a copy without a label holds is unknown, so a label goes before its copy is written over.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from dsrun.checkpoint_files.folder.publish import add_boxes
from dsrun.checkpoint_files.index.value import Index, StoredFile
from dsrun.checkpoint_files.reference import summed
from dsrun.errors import CheckpointError
from dsrun.files.regular import open_regular, read_regular
from dsrun.host.memory import read_host_memory

from ..staging.buffer import PageLocks

GENERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What is known of a copy.

    Attributes:
        rank: rank that the copied state belongs to.
        step: optimizer steps that it is of.
        identity: the same for all ranks' copies of one moment, and of no other.
        node_of: number of the host of each rank, as they were.
        nbytes: bytes of the copy's file.
        sums: checksums of the file's blocks, as in `StoredFile`.
        values: values that are no tensors, as in the index of a checkpoint.
        aliases: names of tied parameters, mapped to the names they are stored under, as in the index of a checkpoint.
    """

    rank: int
    step: int
    identity: int
    node_of: Sequence[int]
    nbytes: int
    sums: Sequence[str]
    values: Mapping[str, Any]
    aliases: Mapping[str, str]

    @property
    def stored(self) -> StoredFile:
        """Size and checksums."""
        return StoredFile(self.nbytes, tuple(self.sums))

    def to_bytes(self) -> bytes:
        """Returns it as text with a checksum."""
        text = json.dumps(asdict(self)).encode()
        return xxh3_64_hexdigest(text).encode() + text

    @classmethod
    def from_bytes(cls, text: bytes) -> Label | None:
        """Returns the label that a text is; None where it is damaged, or of another version."""
        if text[:16] != xxh3_64_hexdigest(text[16:]).encode():
            return None
        try:
            label = cls(**json.loads(text[16:]))
        except (TypeError, ValueError):
            return None
        return label


class CopyFiles:
    """The folder.

    Args:
        folder: folder on a file system in memory; created if it does not exist.
        locks: page locks for memory that CUDA copies to; None for new ones.

    Raises:
        CheckpointError: it is somebody else's.
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path, *, locks: PageLocks | None = None) -> None:
        self.folder = folder
        self._locks = PageLocks() if locks is None else locks
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat(follow_symlinks=False)
        if folder.is_symlink() or found.st_uid != os.getuid():
            raise CheckpointError(f"{folder}: another user has made it", hint="remove it, or start the job again")
        self._images: dict[tuple[int, int], Tensor] = {}

    def name(self, rank: int, generation: int) -> str:
        """Returns the name of a copy's file."""
        return f"rank-{rank:05d}.{generation}"

    def image(self, rank: int, generation: int, nbytes: int, *, device: torch.device | None = None) -> Tensor:
        """Returns the memory of a copy, which has no label any more: flat uint8, of `nbytes`.

        Args:
            rank: rank that the state in the copy belongs to, or will belong to.
            generation: generation of the copy, 0 or 1.
            nbytes: bytes of the copy; more than 0.
            device: CUDA device to page-lock the memory for; None where values do not come from CUDA.

        Raises:
            OSError: there is not so much memory.
        """
        self.unlabel(rank, generation)
        known = self._images.get((rank, generation))
        if known is None or known.numel() != nbytes:
            self._images.pop((rank, generation), None)
            known = self._images[rank, generation] = self._mapped(self.folder / self.name(rank, generation), nbytes)
            if device is not None:
                self._locks.lock(known, device)
        return known

    def held_bytes(self) -> int:
        """Returns what this process has mapped."""
        return sum(image.numel() for image in self._images.values())

    def bytes_there(self) -> int:
        """Returns the memory of all copies of this host, whoever made them."""
        return sum(path.stat().st_size for path in self.folder.glob("rank-*.[01]"))

    def free_bytes(self) -> int:
        """Returns the memory that copies may take: what is free, and copies there that are written over."""
        disk = os.statvfs(self.folder)
        free = min(disk.f_bavail * disk.f_frsize, read_host_memory().available_bytes or 0)
        return free + self.bytes_there()

    def label(self, rank: int, generation: int, label: Label) -> None:
        """Has a copy count from now on.

        Raises:
            OSError: there is no memory for it.
        """
        path = self._label_path(rank, generation)
        unfinished = path.with_suffix(f".{os.getpid()}")
        with open(unfinished, "wb", opener=_open_private) as file:
            file.write(label.to_bytes())
        os.replace(unfinished, path)

    def unlabel(self, rank: int, generation: int) -> None:
        """Has a copy count no more."""
        self._label_path(rank, generation).unlink(missing_ok=True)

    def read_label(self, rank: int, generation: int) -> Label | None:
        """Returns a copy's label; None where it has none that can be read."""
        try:
            return Label.from_bytes(read_regular(self._label_path(rank, generation)))
        except OSError:
            return None

    def whole(self, rank: int, generation: int, node_of: Sequence[int]) -> Label | None:
        """Returns the label of a copy that is whole, to the last bit, and of ranks that lay as they do now.

        Args:
            rank: rank that the state in the copy belongs to.
            generation: generation of the copy, 0 or 1.
            node_of: number of the host of each rank.
        """
        label = self.read_label(rank, generation)
        if label is None or label.rank != rank or list(label.node_of) != list(node_of):
            return None
        try:
            descriptor = open_regular(self.folder / self.name(rank, generation), os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if os.fstat(descriptor).st_size != label.nbytes or not label.nbytes:
                return None
            memory = mmap.mmap(descriptor, label.nbytes)
        finally:
            os.close(descriptor)
        return label if summed([memoryview(memory)]) == label.stored else None

    def index(self, labels: Sequence[Label], generation: int, *, rank: int, size: int) -> Index:
        """Returns the index of what whole copies hold together.

        Args:
            labels: labels of the whole copies that the index is made of.
            generation: generation of the copies, 0 or 1.
            rank: rank from which the index takes the values that are no tensors.
            size: number of ranks.
        """
        index = Index(size, {}, {})
        for label in labels:
            name = self.name(label.rank, generation)
            index.files[name] = label.stored
            index.aliases.update(label.aliases)
            if label.rank == rank:
                index.values.update(label.values)
            if label.nbytes:
                add_boxes(index, self.folder / name, label.stored)
        return index

    def _label_path(self, rank: int, generation: int) -> Path:
        return self.folder / f"{self.name(rank, generation)}.json"

    def _mapped(self, path: Path, nbytes: int) -> Tensor:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Memory that is promised and not there would be a SIGBUS where it is written.
            os.posix_fallocate(descriptor, 0, nbytes)
            os.ftruncate(descriptor, nbytes)
            return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
