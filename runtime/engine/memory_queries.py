"""What an engine holds of its rank's memory, counted and reported. How peaks are found: `observe/memory_watch.py`."""

from __future__ import annotations

from dataclasses import replace

from torch import nn, optim

from ..memory.arenas import ArenaReport, OutsideUse
from ..memory.reused import ReusedMemory
from ..observe.memory import measure
from ..observe.memory_report import MemoryReport
from ..observe.memory_watch import MemoryWatch
from ..offload.params.on_disk import DiskShards
from ..zero.partition_parameters import memory_of
from ..zero.units.trained import is_trained
from .parts import EngineParts

#: What asynchronous saves copy state to; in host memory, wherever the model computes.
_COPY = "copy of a checkpoint"
#: What `offload_states` copies to next time; page-locked, which only accelerators want.
_SPARE = "kept for states that leave"


class HeldMemory:
    """What an engine says of memory; enters no collective."""

    _parts: EngineParts
    _memory_watch: MemoryWatch
    _copies: ReusedMemory | None
    module: nn.Module
    optimizer: optim.Optimizer | None

    def model_state_bytes(self) -> int:
        """Bytes of parameters, gradients, masters and optimizer states that this rank holds in memory now."""
        units = [*self._parts.step.units, *self._parts.frozen_units]
        buffers = [t for u in units for t in (u.flat_param, u.flat_grad, u.shard, u.grad_sum)]
        buffers += [t for u in units for t in ([u.master] if u.halves is None else u.halves.buffers())]
        tiers = {id(u.tier): u.tier for u in units if isinstance(u.tier, DiskShards)}.values()
        buffers += [t for tier in tiers for t in tier.buffers()]
        windows = {id(u.window): u.window for u in units if u.window is not None}.values()
        buffers += [t for window in windows for t in (window.grad, window.master) if t is not None]
        buffers += [memory_of(param) for param in self.module.parameters() if not is_trained(param)]
        states = [] if self.optimizer is None else self._parts.step.optimizer.tensors()
        away = [] if self._parts.step.away is None else self._parts.step.away.buffers()
        return measure(t for t in (*buffers, *states, *away) if self._parts.memory.takes_memory(t))

    def expect_state_bytes(self, total: int, host: int) -> None:
        """Says how many bytes of model state there are from now on, and how many of them in host memory."""
        self._parts = replace(self._parts, predicted_state_bytes=total, predicted_host_bytes=host)

    def memory_arenas(self) -> ArenaReport:
        """Returns the arenas of this rank's long-lived buffers with their high-water marks; its `str` is a table.

        What lies outside of them comes with it: frozen parameters and the module's buffers, which are the model's own,
        optimizer states that nobody could foresee, the copy of state that the last asynchronous save has written, and
        host memory that `offload_states` keeps for its next call.
        """
        memory = self._parts.memory
        held = {
            "frozen parameters": [param for param in self.module.parameters() if not is_trained(param)],
            "module buffers": list(self.module.buffers()),
            "other optimizer states": [] if self.optimizer is None else self._parts.step.optimizer.tensors(),
        }
        outside = {name: measure(t for t in tensors if not memory.holds(t)) for name, tensors in held.items()}
        outside[_COPY] = self._parts.saver.staged_bytes
        outside[_SPARE] = 0 if self._copies is None else self._copies.spare_bytes
        return memory.report([OutsideUse(name, nbytes) for name, nbytes in outside.items() if nbytes])

    def memory_report(self) -> MemoryReport:
        """Returns what this rank held over the last step that was sampled, its peaks and their owners.

        Steps 1, 2, 3, 10, 100 and so on are sampled, and growth is watched over 50 steps; enters no collective. Its
        `str` is for a terminal; `save_plot` draws it.
        """
        return MemoryReport(
            samples=self._memory_watch.samples,
            growths=self._memory_watch.growths,
            state_predicted_bytes=self._parts.predicted_state_bytes,
            state_bytes=self.model_state_bytes(),
        )

    def _memory_kinds(self) -> tuple[tuple[str, int], ...]:
        """Returns names and bytes of what is held for long where the model computes: on a CPU, the host's part too."""
        report = self.memory_arenas()
        on_cpu = self._parts.mesh.device.type == "cpu"
        counted = ("device", "host") if on_cpu else ("device",)
        inside = [(use.name, use.reserved_bytes) for use in report.arenas if use.tier in counted]
        outside = [(use.name, use.used_bytes) for use in report.outside if on_cpu or use.name not in (_COPY, _SPARE)]
        copies = 0 if self._parts.copies is None or not on_cpu else self._parts.copies.held_bytes
        kept = [("copies in memory", copies)] if copies else []
        return (*inside, *outside, *kept)
