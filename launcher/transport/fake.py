"""A transport without hosts: each host's agent is a script of messages. For tests of whatever sits above a channel.

Starts no process and keeps no time: a script goes on when it is read, and waits where it says what it waits for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsrun.errors import LaunchError

from ..hosts.spec import HostSpec
from ..process_modules import LEFTOVERS
from ..protocol import FrameReader, Message, encode


@dataclass(frozen=True, slots=True)
class Await:
    """The agent waits until the front end has sent a message of this type; for ever if it never comes."""

    message_type: type[Message]


@dataclass(frozen=True, slots=True)
class Call:
    """The test does something at this point of the script."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Die:
    """The agent ends with this status, as `Channel.wait` returns it."""

    status: int


#: bytes are sent as they are: noise, or frames of another version.
Step = Message | bytes | Await | Call | Die


#: A frame names its type first.
_TYPE = re.compile(rb'\{"type":"(\w+)"')
#: What `sweep` prints on a host where nothing is left.
NOTHING_LEFT = b'{"agents": [], "ended": [], "left": []}\n'


def is_sweep(argv: Sequence[str]) -> bool:
    """Tells a sweep from an agent."""
    return any(LEFTOVERS in word for word in argv)


class FakeTransport:
    """Gives each host the script under its name; a host without one cannot be started.

    Args:
        scripts: steps by host name. At its end an agent ends with status 0.
        swept: output of `sweep`, by host name; on a host without an entry nothing is left.
    """

    def __init__(self, scripts: Mapping[str, Sequence[Step]], *, swept: Mapping[str, bytes] | None = None) -> None:
        self._scripts = scripts
        self._swept = swept or {}
        #: Hosts on which `sweep` was started.
        self.sweeps: list[str] = []
        #: Channels by host name, as they were started.
        self.channels: dict[str, FakeChannel] = {}

    def start(self, host: HostSpec, argv: Sequence[str]) -> FakeChannel:
        """See `Transport`."""
        if host.name not in self._scripts:
            raise LaunchError(f"host {host.name}: cannot run {argv[0]!r}: no script")
        if is_sweep(argv):
            self.sweeps.append(host.name)
            return FakeChannel([self._swept.get(host.name, NOTHING_LEFT)])
        self.channels[host.name] = FakeChannel(self._scripts[host.name])
        return self.channels[host.name]

    def close(self) -> None:
        """Keeps nothing. See `OwnedTransport`."""


class FakeChannel:
    """A scripted agent, and a record of what it was sent."""

    def __init__(self, script: Sequence[Step]) -> None:
        self.input_ended = False
        self.killed = False
        self._steps = list(script)
        # Undecoded, for of a large job each host's `Start` is large, and tests of size look at few of them.
        self._sent: list[bytes] = []
        self._sent_types: list[str] = []
        self._at_frame_start = True
        self._changed = threading.Condition()
        self._status: int | None = None

    def send(self, data: bytes) -> None:
        """See `Channel`."""
        with self._changed:
            if self._status is not None:
                raise BrokenPipeError("the scripted agent has ended")
            self._sent.append(data)
            self._note_types(data)
            self._changed.notify_all()

    @property
    def received(self) -> list[Message]:
        """What the front end sent, in order."""
        with self._changed:
            return FrameReader().feed(b"".join(self._sent))

    def end_input(self) -> None:
        """See `Channel`."""
        with self._changed:
            self.input_ended = True
            self._changed.notify_all()

    def read_stdout(self) -> bytes:
        """Goes on with the script until there is something to read. See `Channel`."""
        while self._steps and not self._gone():
            match self._steps.pop(0):
                case bytes() as noise:
                    return noise
                case Await(message_type):
                    self._wait_for(message_type)
                case Call(function):
                    function()
                case Die(status):
                    self._end(status)
                case message:
                    return encode(message)
        self._end(0)
        return b""

    def read_stderr(self) -> bytes:
        """Says nothing. See `Channel`."""
        return b""

    def wait(self, timeout_s: float) -> int | None:
        """See `Channel`."""
        with self._changed:
            self._changed.wait_for(lambda: self._status is not None, timeout_s)
            return self._status

    def kill(self) -> None:
        """See `Channel`."""
        with self._changed:
            self.killed = True
            self._end(-9)

    def _gone(self) -> bool:
        return self._status is not None

    def _end(self, status: int) -> None:
        with self._changed:
            if self._status is None:
                self._status = status
            self._changed.notify_all()

    def _note_types(self, data: bytes) -> None:
        begin = 0
        while begin < len(data):
            if self._at_frame_start:
                found = _TYPE.match(data, begin)
                assert found, "the front end sends frames of the protocol"
                self._sent_types.append(found[1].decode())
            end = data.find(b"\n", begin)
            self._at_frame_start = end >= 0
            begin = end + 1 if end >= 0 else len(data)

    def _wait_for(self, message_type: type[Message]) -> None:
        # `TakeStacks` -> `take_stacks`
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", message_type.__name__).lower()
        with self._changed:
            self._changed.wait_for(lambda: self._gone() or self.input_ended or name in self._sent_types)
