"""Tensors from one rank to another beside training: over a Gloo group of its own, so that no collective waits for it.

Host memory only, whatever moves the gradients: what is sent lies there. Knows nothing of what it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

#: What is on its way at a time between two ranks: a link shared with training is held for no longer than this takes.
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes for, or from, another rank.

    Attributes:
        rank: the other one.
        data: flat uint8 in host memory; read or overwritten until `exchange` returns.
    """

    rank: int
    data: Tensor


class Mail(Protocol):
    """Moves parcels; one thread of a rank at a time."""

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Returns when all parcels have come and gone.

        Args:
            sends: parcels to send, at most one to each rank; that rank receives as many bytes from this one at the same
                time.
            receives: parcels to receive, at most one from each rank.

        Raises:
            RuntimeError: another rank is gone, or late.
        """
        ...

    def close(self) -> None:
        """Lets go of what moves them."""
        ...


class GlooMail:
    """Parcels over Gloo, whatever the default group's backend is; every rank of the job must make one.

    Args:
        timeout_s: seconds that an exchange waits for another rank.
    """

    def __init__(self, *, timeout_s: float) -> None:
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(made, dist.ProcessGroup), "every rank is in the group of all ranks"
        self._group = made

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """See `Mail`: chunk by chunk, all ranks of them at once."""
        most = max([parcel.data.numel() for parcel in (*sends, *receives)], default=0)
        for first in range(0, most, CHUNK_BYTES):
            works = [dist.irecv(part, parcel.rank, group=self._group) for parcel, part in _parts(receives, first)]
            works += [dist.isend(part, parcel.rank, group=self._group) for parcel, part in _parts(sends, first)]
            for work in works:
                if work is not None:
                    work.wait()

    def close(self) -> None:
        """See `Mail`."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def _parts(parcels: Sequence[Parcel], first: int) -> list[tuple[Parcel, Tensor]]:
    """Returns the chunks from byte `first` on, of parcels that are so long."""
    return [(one, one.data[first : first + CHUNK_BYTES]) for one in parcels if first < one.data.numel()]
