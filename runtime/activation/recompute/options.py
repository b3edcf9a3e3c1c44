"""How recomputed calls are kept and run again: the words that whoever makes such calls says it in. Acts on nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ..keep.keeper import Keeper
from .rng import RngTracker

#: Makes the contexts of the first and of the second run, e.g. torch's for selective checkpointing.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Observer(Protocol):
    """Hears what calls kept, dropped and took."""

    def ran(self, name: str, *, seconds: float, kept_bytes: int, dropped_bytes: int) -> None:
        """A call ended its first run."""
        ...

    def ran_again(self, name: str, *, seconds: float) -> None:
        """A call ended a later run."""
        ...


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How calls are kept and run again.

    Attributes:
        keeper: keeper of inputs that carry gradients; all others (masks, tables) are kept as they are.
        tracker: tracker of named random generators.
        preserve_rng: draw the same random numbers again; without dropout there is nothing to draw.
        contexts: function that makes the contexts of the first and the second run; None for no contexts.
        synchronize: whether to wait for the accelerator before and after every run.
        observer: None for nobody.
    """

    keeper: Keeper
    tracker: RngTracker
    preserve_rng: bool = True
    contexts: Contexts | None = None
    synchronize: bool = False
    observer: Observer | None = None
