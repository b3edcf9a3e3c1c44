"""Commands over a transport: started, read and failing as tests want them, and none of them left behind."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.base import Channel, Transport
from support.namespaces import NetHost

#: Far above what anything takes, far below what a hang would.
_PATIENCE_S = 20.0
#: A program for `start_python` that sends back what it is sent.
ECHO = "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"


class MakeTransport(Protocol):
    """Makes a transport whose commands end with the test."""

    def __call__(
        self,
        *,
        lease_s: float = ...,
        connect_timeout_s: float = ...,
        config: Path | None = ...,
        note: Callable[[str], None] | None = ...,
        announce: Callable[[str], None] | None = ...,
    ) -> Transport: ...


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


def start_python(transport: Transport, host: NetHost, source: str, *words: str, addr: str | None = None) -> Channel:
    """Runs a piece of Python on the host."""
    return transport.start(host.spec(addr=addr), [sys.executable, "-I", "-c", source, *words])


def read_all(read: Callable[[], bytes]) -> bytes:
    """Reads a stream to its end."""
    pieces: list[bytes] = []
    while data := read():
        pieces.append(data)
    return b"".join(pieces)


def fault_of(transport: Transport, spec: HostSpec) -> LaunchError:
    """The error of a start that must fail, and may not take long."""
    began_s = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        transport.start(spec, ["true"])
    assert time.monotonic() - began_s < _PATIENCE_S
    assert str(caught.value).startswith(f"host {spec.name}: ")
    assert caught.value.hint
    return caught.value
