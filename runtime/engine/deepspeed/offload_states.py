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
from torch import Tensor, optim

from dsrun.errors import InputError, ModelError

from ...memory.arena import Arena
from ...memory.bus import Event
from ...memory.host_pool import host_pool_for
from ...memory.reused import ReusedMemory
from ...memory.room import give_cache_back
from ..parts import EngineParts

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


class PutAway:
    """What an engine offers of it; enters no collective."""

    _parts: EngineParts
    optimizer: optim.Optimizer | None
    _away: _Away | None = None
    _coming: Sequence[tuple[Event, Tensor]] = ()
    _copies: ReusedMemory | None = None
    _copies_locked: bool | None = None

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> int:
        """Moves states to host memory until `reload_states`, see [Note: what may leave]; between steps.

        Until then the model computes, and what needs states (backward, checkpoints, `safe_get_*`) is refused.

        Args:
            include: `optim_states`, `hp_params` and `lp_grads`, or some of them; None: all. DeepSpeed's `lp_params` and
                `contiguous_grad_buffer` are taken and stay. Members of its enumeration are known by their value.
            device: `cpu`.
            pin_memory: page-lock the host memory, which is kept for the next call then, see [Note: whose memory].
            non_blocking: return while copies go on; what the device is given next waits for them. What is free stays
                with torch's allocator then, for tensors of this process alone.

        Returns:
            bytes of states that the device has no more. With what else torch has kept, they are free to every process.

        Raises:
            InputError: another device, or a name that is none of these.
            ModelError: states are away already, or an update is not over yet that a script has to end.
        """
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
        parts = self._parts
        if parts.step.away is not None:
            parts.step.away.settle()
        if parts.step.writes is not None:
            parts.step.writes.take_over()
        parts.saver.fence.wait_all()
        self._end_coming()
        copies = self._copies_for(pin_memory)
        away = _Away(parts, copies, waits=not non_blocking)
        for name in sorted(wanted):
            for beginning in _ARENAS[name]:
                for arena in parts.memory.named(beginning):
                    away.take(arena, keeps=name != "lp_grads" or parts.step.reducer.has_sums)
        if "optim_states" in wanted and self.optimizer is not None:
            away.take_loose(parts.step.optimizer.tensors())
        copies.drop_spare()  # of a call that took more
        if not non_blocking:
            give_cache_back(parts.mesh.device)
        self._away = away
        parts.step.optimizer.put_away = True
        return away.nbytes

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what `offload_states` has moved; nothing happens where it has moved nothing.

        Args:
            non_blocking: return while copies go on; what the device is given next waits for them.
        """
        away, self._away = self._away, None
        if away is not None:
            away.bring_back(waits=not non_blocking)
            self._parts.step.optimizer.put_away = False
            self._coming = away.coming

    def _copies_for(self, locked: bool) -> ReusedMemory:
        if self._copies is None or locked != self._copies_locked:
            self._copies = ReusedMemory(host_pool_for(self._parts.mesh.device, pin=locked, say=print))
            self._copies_locked = locked
        return self._copies

    def _end_coming(self) -> None:
        """Returns when states are back, and nothing reads the host memory that they come from."""
        coming, self._coming = self._coming, ()
        for event, copy in coming:
            event.synchronize()
            assert self._copies is not None, "the copies were made there"
            self._copies.give_back(copy)

    def _drop_copies(self) -> None:
        """Gives host memory back that is kept for the next call; nothing reads it any more."""
        self._coming = ()
        self._copies = None

    def _check_states_here(self, who: str) -> None:
        self._end_coming()
        if self._away is not None:
            raise ModelError(
                f"{who}: states are in host memory since engine.offload_states()",
                hint="call engine.reload_states() first",
            )


class _Away:
    """What has been moved; by whom it is wanted back, `PutAway` knows.

    Args:
        parts: whose arenas they are.
        copies: makes host memory.
        waits: the host waits for copies.

    Attributes:
        nbytes: that the device has no more.
        coming: copies on their way back, and the host memory that they read.
    """

    def __init__(self, parts: EngineParts, copies: ReusedMemory, *, waits: bool) -> None:
        self._bus = parts.bus
        self._memory = parts.memory
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
