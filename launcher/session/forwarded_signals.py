"""A signal on its way to all ranks: which got it and which were spared, once every host has answered. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..protocol import Passed


@dataclass(frozen=True, slots=True)
class ForwardedSignal:
    """What became of one signal.

    Attributes:
        signal: its number.
        ranks: ranks that got the signal.
        spared: ranks that did not get the signal, as they do not catch it and would have died.
    """

    signal: int
    ranks: tuple[int, ...]
    spared: tuple[int, ...]


@dataclass(slots=True)
class _Sent:
    signal: int
    waiting: set[str]
    ranks: list[int] = field(default_factory=list[int])
    spared: list[int] = field(default_factory=list[int])


class SignalRelay:
    """Signals in the order they were sent; each host answers them in that order."""

    def __init__(self) -> None:
        self._sent: list[_Sent] = []

    def send(self, signum: int, hosts: Iterable[str]) -> None:
        """Notes that a signal was sent to these hosts."""
        self._sent.append(_Sent(signum, set(hosts)))

    def answered(self, host: str, answer: Passed) -> None:
        """Notes a host's answer."""
        for sent in self._sent:
            if sent.signal == answer.signal and host in sent.waiting:
                sent.waiting.remove(host)
                sent.ranks += answer.ranks
                sent.spared += answer.spared
                return

    def gone(self, host: str) -> None:
        """Notes that a host will answer no more."""
        for sent in self._sent:
            sent.waiting.discard(host)

    def complete(self) -> list[ForwardedSignal]:
        """Takes out the signals that every host has answered, oldest first."""
        done = [sent for sent in self._sent if not sent.waiting]
        self._sent = [sent for sent in self._sent if sent.waiting]
        return [ForwardedSignal(sent.signal, tuple(sorted(sent.ranks)), tuple(sorted(sent.spared))) for sent in done]
