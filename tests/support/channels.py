"""A transport that remembers what it started, so that a test leaves no process and no connection behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from dsrun.launcher.hosts import HostSpec
from dsrun.launcher.transport.base import Channel, Transport

_PATIENCE_S = 20.0


class RememberingChannels:
    """Starts commands by another transport, and ends them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._changed = threading.Condition()
        self._starting = 0
        self._channels: list[Channel] = []

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        """See `Transport`."""
        with self._changed:
            self._starting += 1
        try:
            channel = self._transport.start(host, argv)
            self._channels.append(channel)
            return channel
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify_all()

    def end_all(self) -> None:
        """Kills and drains every channel; also those that a session gave up while they were opening."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._starting == 0, _PATIENCE_S), "a start has an end"
        for channel in self._channels:
            channel.kill()
            assert channel.wait(_PATIENCE_S) is not None
            with suppress(OSError):
                channel.end_input()
            for read in (channel.read_stdout, channel.read_stderr):
                with suppress(OSError):
                    while read():
                        pass
