"""States out of the way for a while: `offload_states` frees the device for a generation phase, `reload_states` ends it.

Where states live while training goes on is the config's business (`offload_optimizer`).

[Note: what may leave] Masters, optimizer states and sums of gradients: 16 bytes an element of Adam in bf16. Parameters
stay, so the model generates meanwhile; so do buffers that gradients pass through. Memory goes with all of an arena, and
what comes back has the bits that left; sums that hold nothing are not copied.

[Note: whose memory] A call that waits gives what has left back to CUDA, for a generation engine is often another
process. Page-locked host memory stays the engine's until `destroy`, as much as the last call has used: locking it
takes seconds for 10 GB, and the next generation phase wants as much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import InputError, ModelError

from ..checkpoint.save.fence import Fence
from ..memory.arena import Arena
from ..memory.bus import Event
from ..memory.host_pool import host_pool_for
from ..memory.reused import ReusedMemory
from ..memory.room import give_cache_back
from ..zero.access.script_writes import ScriptWrites
from ..zero.grads.reducer import GradReducer
from .host.tiers import Tiers
from .update import Update

#: DeepSpeed's names of what can leave, and how the names of arenas that hold it begin; none: it stays, see the note.
_ARENAS: dict[str, tuple[str, ...]] = {
    "optim_states": ("optimizer states",),
    "hp_params": ("masters",),
    "lp_grads": ("gradient sums",),
    "lp_params": (),
    "contiguous_grad_buffer": (),
}
#: States of fewer bytes stay: counts of steps.
_SMALL = 1 << 10


@dataclass(slots=True, eq=False)
class _Loose:
    """A storage in no arena, and the copy of what it held."""

    memory: Tensor
    copy: Tensor


class OffloadedStates:
    """States that an engine has moved to host memory for a while; enters no collective.

    Args:
        device: Device that training uses.
        tiers: Arenas that states lie in, and the bus that carries them.
        update: The optimizer.
        reducer: Sums of gradients.
        writes: Values that the script has written to parameters.
        fence: Saves that still copy state.
    """

    def __init__(
        self,
        device: torch.device,
        tiers: Tiers,
        update: Update,
        *,
        reducer: GradReducer,
        writes: ScriptWrites,
        fence: Fence,
    ) -> None:
        self._device = device
        self._tiers = tiers
        self._update = update
        self._reducer = reducer
        self._writes = writes
        self._fence = fence
        self._away: _Away | None = None
        self._coming: Sequence[tuple[Event, Tensor]] = ()
        self._copies: ReusedMemory | None = None
        self._copies_locked: bool | None = None

    @property
    def spare_bytes(self) -> int:
        """Bytes of host memory that are kept for the next call."""
        return 0 if self._copies is None else self._copies.spare_bytes

    def move_out(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> int:
        """Moves states to host memory, see `Engine.offload_states`; scripts call it by the optimizer too."""
        wanted = _names_of(include)
        if _text(device) != "cpu":
            raise InputError(
                f'engine.offload_states: device is {_text(device)!r}; expected "cpu"',
                hint="leave it out: host memory is where states go",
            )
        if self._away is not None:
            raise ModelError(
                "engine.offload_states: states are in host memory already", hint="call engine.reload_states() first"
            )
        update = self._update
        if update.away is not None:
            update.away.settle()
        self._writes.take_over()
        self._fence.wait_all()
        self._end_coming()
        copies = self._copies_for(pin_memory)
        away = _Away(self._tiers, copies, waits=not non_blocking)
        if "lp_grads" in wanted:
            self._reducer.used_factor = None  # what the last step has left of them is not kept
        for name in sorted(wanted):
            for beginning in _ARENAS[name]:
                for arena in self._tiers.memory.named(beginning):
                    away.take(arena, keeps=name != "lp_grads" or self._reducer.has_sums)
        if "optim_states" in wanted and update.optimizer is not None:
            away.take_loose(update.shards.tensors())
        copies.drop_spare()  # of a call that took more
        if not non_blocking:
            give_cache_back(self._device)
        self._away = away
        update.shards.put_away = True
        return away.nbytes

    def move_back(self, non_blocking: bool = False) -> None:
        """Brings states back, see `Engine.reload_states`; scripts call it by the optimizer too."""
        away, self._away = self._away, None
        if away is not None:
            away.bring_back(waits=not non_blocking)
            self._update.shards.put_away = False
            self._coming = away.coming

    def check_here(self, who: str) -> None:
        """Refuses a call while states are in host memory; waits for those on their way back.

        Args:
            who: name of the call, for the message.

        Raises:
            ModelError: states are in host memory.
        """
        self._end_coming()
        if self._away is not None:
            raise ModelError(
                f"{who}: states are in host memory since engine.offload_states()",
                hint="call engine.reload_states() first",
            )

    def close(self) -> None:
        """Gives host memory back that is kept for the next call; nothing reads it any more."""
        self._coming = ()
        self._copies = None

    def _copies_for(self, locked: bool) -> ReusedMemory:
        if self._copies is None or locked != self._copies_locked:
            self._copies = ReusedMemory(host_pool_for(self._device, pin=locked, say=print))
            self._copies_locked = locked
        return self._copies

    def _end_coming(self) -> None:
        """Returns when states are back, and nothing reads the host memory that they come from."""
        coming, self._coming = self._coming, ()
        for event, copy in coming:
            event.synchronize()
            assert self._copies is not None, "the copies were made there"
            self._copies.give_back(copy)


class _Away:
    """What has been moved; by whom it is wanted back, `OffloadedStates` knows.

    Args:
        tiers: Arenas that states lie in, and the bus that carries them.
        copies: allocator of the host memory for the copies, which reuses what was given back.
        waits: the host waits for copies.

    Attributes:
        nbytes: bytes that the device no longer holds.
        coming: copies on their way back, and the host memory that they read.
    """

    def __init__(self, tiers: Tiers, copies: ReusedMemory, *, waits: bool) -> None:
        self._bus = tiers.bus
        self._memory = tiers.memory
        self._copies = copies
        self._waits = waits
        self._arenas: list[Arena] = []
        self._loose: list[_Loose] = []
        self.coming: list[tuple[Event, Tensor]] = []
        self.nbytes = 0

    def take(self, arena: Arena, *, keeps: bool) -> None:
        """Moves an arena, if it is on the device; without `keeps` it comes back as zeros."""
        if arena.use().tier != "device" or not arena.use().reserved_bytes:
            return
        out: Callable[[Tensor], Tensor] | None = self._out if keeps else None
        self.nbytes += arena.put_away(out)
        self._arenas.append(arena)

    def take_loose(self, tensors: Collection[Tensor]) -> None:
        """Moves states that torch has put where it likes: their storages, each once."""
        storages = {t.untyped_storage().data_ptr(): t for t in tensors if not self._memory.holds(t)}
        for tensor in storages.values():
            storage = tensor.untyped_storage()
            if storage.nbytes() < _SMALL or not storage.resizable():
                continue
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._loose.append(_Loose(memory, self._out(memory)))
            self.nbytes += storage.nbytes()
            storage.resize_(0)

    def bring_back(self, *, waits: bool) -> None:
        """Undoes it all."""
        self._waits = waits
        for arena in self._arenas:
            arena.bring_back(self._back)
        for loose in self._loose:
            loose.memory.untyped_storage().resize_(loose.copy.nbytes)
            self._back(loose.copy, loose.memory)

    def _out(self, memory: Tensor) -> Tensor:
        copy = self._copies.take(memory.numel(), dtype=memory.dtype)
        event = self._bus.start_out(memory, copy, kind="states")
        self._bus.wait(event)  # the memory goes behind the copy, in the order of the current stream
        if self._waits:
            event.synchronize()
        elif memory.device.type != "cpu":
            # Memory goes in the order of the stream that it was allocated on, which need not be this one.
            memory.record_stream(torch.get_device_module(memory.device).current_stream(memory.device))
        return copy

    def _back(self, copy: Tensor, memory: Tensor) -> None:
        event = self._bus.start_back(copy, memory, kind="states")
        self._bus.wait(event)
        if self._waits:
            event.synchronize()
            self._copies.give_back(copy)
        else:
            self.coming.append((event, copy))


def _names_of(include: Collection[Any] | None) -> set[str]:
    if include is None:
        return set(_ARENAS)
    names = {_text(item) for item in include}
    unknown = sorted(names - set(_ARENAS))
    if unknown:
        raise InputError(
            f"engine.offload_states: include names {', '.join(unknown)}; expected some of {', '.join(_ARENAS)}"
        )
    return names


def _text(item: Any) -> str:
    """Returns a name, or that of a member of an enumeration as DeepSpeed has it."""
    return str(getattr(item, "value", item))
