"""What a call ran in, noted before its first run and put back for the second.

These are generators, autocast, the default device, and the kernels of attention: which of those runs decides what is
saved.

Not the hooks and contexts that treat what the call saves: these are the call's own, see `call.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from ...compat import AttentionChoice
from .rng import RngState, RngTracker, capture, replayed


@dataclass(frozen=True, slots=True)
class _Autocast:
    """What `torch.autocast` was in effect."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_types: set[str]) -> tuple[_Autocast, ...]:
        return tuple(
            cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(device_types)
        )

    def again(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)


class Surroundings:
    """Those of this moment.

    Args:
        tensors: tensors that the call takes; generators and autocast are noted for their devices and for the CPU.
        tracker: tracker of named random generators.
        preserve_rng: note the generators too.
    """

    def __init__(self, tensors: Sequence[Tensor], tracker: RngTracker, *, preserve_rng: bool) -> None:
        self._tracker = tracker
        self._rng: RngState | None = capture(tensors, tracker) if preserve_rng else None
        self._autocast = _Autocast.now({tensor.device.type for tensor in tensors} | {"cpu"})
        self._device = torch.get_default_device()
        self._attention = AttentionChoice.now()
        self._in_order = False

    def settle(self) -> None:
        """The first run is over: the order of attention's kernels counts from here on, too.

        torch settles that order when attention first runs on a GPU, so before the run it may not be what the run had.
        """
        self._attention = AttentionChoice.now()
        self._in_order = True

    @contextmanager
    def again(self) -> Generator[None]:
        """Inside, everything is as it was; outside, nothing has been drawn."""
        with ExitStack() as stack:
            if self._rng is not None:
                stack.enter_context(replayed(self._rng, self._tracker))
            for autocast in self._autocast:
                if autocast.enabled or torch.is_autocast_enabled(autocast.device_type):
                    stack.enter_context(autocast.again())
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            then, now = self._attention, AttentionChoice.now()
            if then != now if self._in_order else then.allowed != now.allowed:
                stack.enter_context(sdpa_kernel(then.kernels(), set_priority=self._in_order))
            yield
