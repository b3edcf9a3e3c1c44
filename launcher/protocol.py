"""The messages between front end, agent and spawner, and how they look on a pipe: one JSON object a line.

Knows the shape of each message and nothing of what it makes anybody do. No I/O: bytes in, messages out.

[Note: raw text] Output travels as the very bytes a rank wrote, decoded with `surrogateescape`, as ASCII JSON.
Chunks are cut anywhere, even inside a UTF-8 character: each undecodable byte becomes one lone surrogate, JSON
keeps it as an escape, and encoding with `surrogateescape` gives the same bytes back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from dsrun.contract import WorkerError
from dsrun.errors import DsrunError

#: Changes whenever an older peer would misread a message.
VERSION = 1
#: A longer frame is no message of ours: a peer that sends one is not trusted with more memory.
MAX_FRAME_BYTES = 16 << 20

StreamName = Literal["stdout", "stderr"]


class ProtocolError(DsrunError):
    """A peer sent bytes that are not a message of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Front end to agent, first message: the launch, as `LaunchPlan.to_json` wrote it, and which host this is."""

    plan: dict[str, Any]
    node_rank: int
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Front end to agent: send `signal` to every rank, and kill what is left when the plan's grace is over."""

    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Front end to agent: kill everything now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Agent to front end, the reply to `Start`; `time_s` is the agent's clock, seconds since the epoch."""

    pid: int
    time_s: float
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Spawner to agent to front end: every rank of the host runs; pids in the order of the node's workers."""

    pids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Agent to front end: bytes of one rank's stream in order of arrival. See [Note: raw text].

    Attributes:
        rank: who wrote.
        stream: where to.
        sequence: counts this rank's frames from 0, both streams together.
        time_s: when the agent read them, by its clock.
        text: the bytes; several lines, or part of one.
    """

    rank: int
    stream: StreamName
    sequence: int
    time_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Spawner to agent to front end: a rank ended.

    Attributes:
        rank: which one.
        status: exit code, or minus the signal's number.
        time_s: when it was reaped, by the host's clock.
        error: what the rank itself wrote into its error file; added by the agent.
    """

    rank: int
    status: int
    time_s: float
    error: WorkerError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Spawner to agent to front end: this host cannot run its ranks any more.

    Attributes:
        reason: why, in words.
        time_s: since when, by the host's clock; ranks that end later did so because of it.
    """

    reason: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Agent to front end, last message: nothing of the job runs on this host any more, and all output was sent.

    Attributes:
        unkillable: pids that outlived SIGKILL (a process in the kernel's hands, or another user's).
    """

    unkillable: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """Agent to spawner, first message.

    Attributes:
        plan: as in `Start`.
        node_rank: as in `Start`.
        agent_pid: who must be the spawner's parent; another parent means that the agent is dead.
        master_addr: address of the rendezvous store.
        master_port: its port.
        store_fd: the listening socket to serve it on; None where another host does.
        output_fds: write ends for stdout and stderr of each worker, in the order of the node's workers.
    """

    plan: dict[str, Any]
    node_rank: int
    agent_pid: int
    master_addr: str
    master_port: int
    store_fd: int | None
    output_fds: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Agent to spawner, last message: nothing is left below you, exit. An end of file without it means kill."""


Message = Start | Stop | Kill | Hello | Started | Output | Exit | Failed | Finished | Spawn | Release

_CLASS_OF: dict[str, type[Message]] = {
    "start": Start,
    "stop": Stop,
    "kill": Kill,
    "hello": Hello,
    "started": Started,
    "output": Output,
    "exit": Exit,
    "failed": Failed,
    "finished": Finished,
    "spawn": Spawn,
    "release": Release,
}
_NAME_OF = {cls: name for name, cls in _CLASS_OF.items()}
_FIELDS_OF = {cls: tuple(field.name for field in fields(cls)) for cls in _CLASS_OF.values()}


def encode(message: Message) -> bytes:
    """Returns one frame: ASCII JSON and a newline."""
    cls = type(message)
    # A shallow dict: `asdict` copies deeply, which costs more than everything else on the output path.
    body: dict[str, Any] = {name: getattr(message, name) for name in _FIELDS_OF[cls]}
    if isinstance(message, Exit) and message.error is not None:
        body["error"] = asdict(message.error)
    return json.dumps({"type": _NAME_OF[cls], **body}, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> Message:
    """Reads one frame.

    Args:
        line: the frame, with or without its newline.

    Raises:
        ProtocolError: these bytes are no message.
    """
    try:
        body: Any = json.loads(line)
        cls = _CLASS_OF[body.pop("type")]
        if cls is Exit and body["error"] is not None:
            body["error"] = WorkerError(**body["error"])
        return cls(**body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        shown = line[:200].decode("utf-8", "backslashreplace").rstrip()
        raise ProtocolError(f"protocol: expected a message of version {VERSION}, got {shown!r}") from error


class FrameReader:
    """Cuts a byte stream into messages; holds at most one unfinished frame of MAX_FRAME_BYTES."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._held_bytes = 0

    def feed(self, data: bytes) -> list[Message]:
        """Returns the messages that `data` completes.

        Raises:
            ProtocolError: a frame is no message or too long; the stream cannot be read on.
        """
        *complete, rest = data.split(b"\n")
        messages: list[Message] = []
        for line in complete:
            self._parts.append(line)
            messages.append(decode(b"".join(self._parts)))
            self._parts, self._held_bytes = [], 0
        if rest:
            self._parts.append(rest)
            self._held_bytes += len(rest)
        if self._held_bytes > MAX_FRAME_BYTES:
            raise ProtocolError(f"protocol: a frame is longer than {MAX_FRAME_BYTES} bytes")
        return messages
