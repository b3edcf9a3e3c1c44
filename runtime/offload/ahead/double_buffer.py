"""Masters, states and new parameters a second time, so that a step may be taken and then not count.

Memory, and how two sets change places; what is written there, and when, is decided in `speculation.py`.

[Note: two sets]
A range's masters and states are in one of two memories, and a step that may not count reads there and writes to the
other. When it counts the tensors change places: a tensor that somebody holds (`unit.master`, an optimizer's leaf, its
state) stays the same object and has the other memory from then on, so nothing is copied and nobody has to be told.
Steps that count from the beginning are taken in place, so ranges may be in different sets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...memory.arena import room_for
from ...memory.arenas import Arenas
from ...memory.host_pool import HostPool
from ...optim.structure.runs import Run
from ..states.host_range import HostRange, part_of


class DoubleBuffer:
    """See [Note: two sets].

    Args:
        ranges: ranges of all units, by their number.
        states: foreseen states of one value an element, of each range.
        state_dtype: theirs.
        copied: pool that makes host memory for values that copies read or write.
        own: pool that makes host memory that the processor alone uses.
        memory: arenas in which the second set is reserved.
    """

    def __init__(
        self,
        ranges: Sequence[HostRange],
        states: Sequence[int],
        *,
        state_dtype: torch.dtype,
        copied: HostPool,
        own: HostPool,
        memory: Arenas,
    ) -> None:
        self._ranges = ranges
        numels = [item.numel for item in ranges]
        # In fp32 the masters themselves are what crosses the bus.
        travel = any(item.is_its_parameters for item in ranges)
        master = ranges[0].master_N.dtype
        arena = memory.reserve(
            "second masters",
            room_for(numels),
            lambda numel: (copied if travel else own).zeros(numel, dtype=master),
            tier="host",
        )
        self._masters = [arena.take(item.numel).copy_(item.master_N) for item in ranges]
        self._states: dict[int, list[Tensor]] = {}
        self._numbers = {id(run.owned): number for number, item in enumerate(ranges) for run in item.runs}
        self._names: dict[int, list[str]] = {}
        self._partners: dict[tuple[int, str], dict[int, Tensor]] = {}
        self._loose: dict[tuple[int, str, int], Tensor] = {}
        if any(states):
            room = sum(room_for([numel]) * count for numel, count in zip(numels, states, strict=True))
            arena = memory.reserve(
                "second optimizer states", room, lambda numel: own.zeros(numel, dtype=state_dtype), tier="host"
            )
            for number, count in enumerate(states):
                self._states[number] = [arena.take(numels[number]) for _ in range(count)]
        self._params: dict[int, Tensor] = {}
        rounded = [number for number, item in enumerate(ranges) if not item.is_its_parameters]
        if rounded:
            compute = ranges[rounded[0]].target_N.dtype
            arena = memory.reserve(
                "new parameters",
                room_for([numels[number] for number in rounded]),
                lambda numel: copied.zeros(numel, dtype=compute),
                tier="host",
            )
            self._params = {number: arena.take(numels[number]) for number in rounded}

    def buffers(self) -> list[Tensor]:
        """Returns all of it, and where states have come from that lie in it now."""
        states = [place for places in self._states.values() for place in places]
        partners = [tensor for of_state in self._partners.values() for tensor in of_state.values()]
        others = [*self._loose.values(), *partners]
        return [*self._masters, *states, *self._params.values(), *others]

    def master(self, index: int) -> Tensor:
        """Returns the memory that a range's masters are not in now, [N]."""
        return self._masters[index]

    def parameters(self, index: int) -> Tensor | None:
        """Returns a place for a range's new parameters, [N]; None where the masters are what is wanted."""
        return self._params.get(index)

    def state(self, run: Run, name: str, now_N: Tensor) -> Tensor:
        """Returns the memory that a run's state is not in now, as large as the run.

        Args:
            run: run of a range that the state belongs to.
            name: name of the state.
            now_N: the state, wherever somebody has put it.
        """
        mine_N = self._mine(run, name, now_N)
        of_state = self._partners.setdefault((id(run.owned), name), {})
        if mine_N.data_ptr() == now_N.data_ptr():
            # That of a longer run, if this one was cut from it since.
            start = max(start for start in of_state if start <= run.start)
            return of_state[start].narrow(0, run.start - start, run.numel)
        before = of_state.get(run.start)
        if before is not None and before.numel() > run.numel:
            of_state.setdefault(run.start + run.numel, before[run.numel :])
        of_state[run.start] = now_N.data
        return mine_N

    def exchange(self, index: int) -> None:
        """Lets a range's masters change places, and its parameters where they live on the host."""
        item = self._ranges[index]
        master_N, spare_N = item.master_N, self._masters[index]
        self._masters[index] = master_N.data
        master_N.data = spare_N
        for run in item.runs:
            run.param.data = part_of(run, master_N)
        if item.stays and index in self._params:
            params_N, self._params[index] = self._params[index], item.target_N.data
            item.target_N.data = params_N

    def _mine(self, run: Run, name: str, now_N: Tensor) -> Tensor:
        """Returns a state's place in this set: reserved, or made now where there are more states than foreseen."""
        number = self._numbers[id(run.owned)]
        places, names = self._states.get(number, []), self._names.setdefault(number, [])
        if name not in names and len(names) < len(places):
            names.append(name)
        if name in names and places[names.index(name)].dtype == now_N.dtype:
            return part_of(run, places[names.index(name)])
        key = (id(run.owned), name, run.start)
        made = self._loose.get(key)
        if made is None or made.dtype != now_N.dtype or made.numel() != run.numel:
            made = self._loose[key] = torch.empty_like(now_N)
        return made
