"""An observer of waits that adds up their seconds."""

from __future__ import annotations

from dsrun.runtime.mesh.collectives import WaitKind


class WaitSeconds:
    """Adds up what a rank is told to have waited."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def enter(self, collective: str, kind: WaitKind) -> None: ...

    def leave(self, waited_s: float) -> None:
        self.waited_s += waited_s
