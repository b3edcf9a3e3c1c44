"""How parts measure. Nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says.

    Attributes:
        peer_python: an interpreter that has DeepSpeed; None: without it.
        runs: rounds that count; one before them does not.
        threads: number of threads that every contender uses.
        quick: sizes for a look at whether it runs; such figures say nothing.
    """

    peer_python: str | None
    runs: int
    threads: int
    quick: bool
