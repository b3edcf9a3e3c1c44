"""Memory by way of which ranks of a host give each other the blocks of a checkpoint that several of them want."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from zlib import crc32

import torch

from dsrun.checkpoint_files.blocks.shared import SharedBlocks, shared_bytes
from dsrun.checkpoint_files.index.value import Index

from ...mesh.collectives import Collectives
from ...mesh.host_memory.segments import find_hosts, share_memory


def share_blocks(index: Index, collectives: Collectives, *, device: torch.device) -> SharedBlocks | None:
    """Returns what to read a checkpoint with, once; None where this rank shares nothing. Every rank must call.

    It enters four small collectives.

    Args:
        index: the checkpoint's.
        collectives: collectives of all ranks that load the checkpoint.
        device: device of the tensors that the collectives use.
    """

    def exchange(mine: Sequence[int]) -> list[list[int]]:
        told = torch.tensor(list(mine), dtype=torch.int64, device=device)
        everyone = torch.empty(collectives.size * told.numel(), dtype=torch.int64, device=device)
        label = "who shares memory to load with"
        collectives.all_gather(everyone, told, label=label).wait()
        with collectives.reading(label):
            return everyone.view(collectives.size, -1).tolist()

    own = next(ranks for ranks in find_hosts(exchange) if collectives.rank in ranks)
    files = repr([(name, index.files[name].nbytes) for name in sorted(index.files)])
    seen = exchange([crc32(files.encode())])
    is_same = all(seen[rank] == seen[collectives.rank] for rank in own)
    try:
        segments = share_memory(
            shared_bytes(index) if is_same else mmap.PAGESIZE,
            lambda mine: [told for rank, told in enumerate(exchange(mine)) if rank in own],
        )
    except OSError:  # on all ranks of this host, which read by themselves
        return None
    if len(own) == 1 or not is_same:
        return None
    return SharedBlocks(segments, own.index(collectives.rank), index)
