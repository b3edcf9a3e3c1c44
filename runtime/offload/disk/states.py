"""Masters and optimizer states of all units on a disk (`offload_optimizer.device` "nvme"): a record each.

Says where they lie, and when they are there; what steps on them is `offload/step/cpu_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsrun.direct_io.counts import IoCounts
from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.settings import round_up

from ...memory.arenas import Arenas
from ...memory.host_pool import HostPool
from ...optim.states.format import FP32_STATES, StateFormat
from .file_addresses import FileAddresses
from .records import DiskRecords

_MASTERS, _STATES = 0, 1


class DiskStates:
    """See the module. Masters first, by `reserve` and `admit`; then steps, each between `begin` and `end`.

    Args:
        file: file that gets the records.
        memory: arenas in which the records' addresses and the frames are reserved.
        states: number of states with one value per element that there is to be room for.
        frames: records that may be in memory at once.
        read_ahead: whether records are read before they are needed; see `DiskRecords`.
        write_behind: whether records are put away without a wait for the disk; see `DiskRecords`.
        writes_zeros: whether to write states also before the first step makes them.
        form: format of the states.
    """

    def __init__(
        self,
        file: ExtentFile,
        memory: Arenas,
        *,
        states: int,
        frames: int,
        read_ahead: bool,
        write_behind: bool,
        writes_zeros: bool,
        form: StateFormat = FP32_STATES,
    ) -> None:
        self._form = form
        self._file = file
        self._memory = memory
        self._state_count = states
        self._frames = frames
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._writes_zeros = writes_zeros
        self._numels: list[int] = []
        self._records: DiskRecords | None = None

    # What zero asks for: a place for masters --------------------------------------------------------------------------

    def reserve(self, labels: Sequence[str], numels: Sequence[int], master: torch.dtype, state: torch.dtype) -> None:
        """Makes room on the disk for all units.

        Args:
            labels: names of the units, for error messages.
            numels: elements of each that this rank updates; at least 1.
            master: dtype of masters.
            state: dtype of optimizer states, where no format of their own says it.

        Raises:
            OffloadError: there is not so much room.
        """
        self._numels, self._master, self._state = list(numels), master, state
        pool = HostPool(None, say=_never)
        self._records = DiskRecords(
            self._file,
            labels,
            [self._parts(numel) for numel in numels],
            frames=self._frames,
            memory=lambda nbytes: self._memory.reserve(
                "disk frames", nbytes, lambda total: pool.zeros(total, dtype=torch.uint8), tier="host"
            ).take(nbytes),
            read_ahead=self._read_ahead,
            write_behind=self._write_behind,
        )
        self._memory.reserve("masters and states", self._records.nbytes, self._records.everything, tier="disk").take(
            self._records.nbytes
        )

    def admit(self, index: int, values_N: Tensor) -> Tensor:
        """Takes a unit's first masters, in any dtype and on any device; returns them where they are from now on."""
        records = self._reserved
        records.bring(index)
        master_N = records.tensor(index, _MASTERS, 0, self._numels[index], self._master).copy_(values_N)
        records.put_away(index, changed=None if self._writes_zeros else (_MASTERS,))
        return master_N

    # What the optimizer's housing asks for ----------------------------------------------------------------------------

    def state_places(self, index: int) -> list[list[Tensor]]:
        """Returns the buffers of a unit's states; readable when the unit is here."""
        numel, start = self._numels[index], 0
        places: list[list[Tensor]] = []
        for _ in range(self._state_count):
            parts: list[Tensor] = []
            for dtype, count in self._parts_of_state(numel):
                parts.append(self._reserved.tensor(index, _STATES, start, count, dtype))
                start += round_up(count * dtype.itemsize)
            places.append(parts)
        return places

    def note_states(self, index: int) -> None:
        """Says that a unit's states get values, which may be while all units are shown."""
        self._reserved.note_written(index, _STATES)

    # What the step asks for: `StateKeeper` ----------------------------------------------------------------------------

    def begin(self) -> None:
        """See `StateKeeper`."""
        self._reserved.hide()

    def expect(self, index: int) -> None:
        """See `StateKeeper`."""
        self._reserved.expect(index)

    def bring(self, index: int) -> None:
        """See `StateKeeper`."""
        self._reserved.bring(index)

    def put_away(self, index: int) -> None:
        """See `StateKeeper`."""
        self._reserved.put_away(index)

    def end(self) -> None:
        """See `StateKeeper`."""
        self._reserved.show()

    # ------------------------------------------------------------------------------------------------------------------

    def addresses(self) -> list[FileAddresses]:
        """Returns where in files masters and states lie, for checkpoints."""
        return [self._reserved.addresses()]

    @property
    def file_bytes(self) -> int:
        """Bytes of the files."""
        return self._file.reserved_bytes

    def counts(self) -> IoCounts:
        """Returns what was moved past the page cache so far."""
        return self._file.counts()

    def buffers(self) -> list[Tensor]:
        """See `StateKeeper`."""
        return [self._reserved.frame_memory]

    def close(self) -> None:
        """Ends reads and writes; what is shown can be read for as long as its tensors live."""
        self._file.close()

    @property
    def _reserved(self) -> DiskRecords:
        assert self._records is not None, "room is reserved before anything is put there"
        return self._records

    def _parts(self, numel: int) -> list[tuple[str, int]]:
        parts = [("masters", numel * self._master.itemsize)]
        if self._state_count:
            of_state = sum(round_up(count * dtype.itemsize) for dtype, count in self._parts_of_state(numel))
            parts.append(("states", self._state_count * of_state))
        return parts

    def _parts_of_state(self, numel: int) -> list[tuple[torch.dtype, int]]:
        """Returns dtype and elements of the tensors of one state."""
        form = self._form
        if form is FP32_STATES:
            return [(self._state, numel)]
        return [(part.dtype, form.place_numel(number, numel)) for number, part in enumerate(form.parts)]


def _never(text: str) -> None:
    raise AssertionError(f"memory that is not page-locked cannot fail to be: {text}")
