"""The messages between front end, agent and spawner, and how they look on a pipe: one JSON object a line.

Knows the shape of each message and nothing of what it makes anybody do. No I/O: bytes in, messages out.

[Note: raw text] Output travels as the very bytes a rank wrote, decoded with `surrogateescape`, as ASCII JSON.
Chunks are cut anywhere, even inside a UTF-8 character: each undecodable byte becomes one lone surrogate, JSON
keeps it as an escape, and encoding with `surrogateescape` gives the same bytes back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from dsrun.contract.error_file import WorkerError
from dsrun.errors import DsrunError

#: Changes whenever an older peer would misread a message.
VERSION = 12
#: A longer frame is no message of ours: a peer that sends one is not trusted with more memory.
MAX_FRAME_BYTES = 16 << 20

StreamName = Literal["stdout", "stderr"]
#: What a rank does with its stdin, see `rank_stdin`: it waits for a person, or for a pipe; a person has typed a line;
#: the wait ended otherwise; it reads although no stdin was given to it.
ReadingState = Literal["waits", "waits_for_pipe", "typed", "goes_on", "has_none"]
#: What a rank that has not started yet is at: its interpreter starts, or torch is imported. Empty: its program runs.
Starting = Literal["", "interpreter", "torch"]


class ProtocolError(DsrunError):
    """A peer sent bytes that are not a message of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Front end to agent, first message.

    Attributes:
        plan: the launch, as `LaunchPlan.to_json` wrote it.
        node_rank: rank of this host among the plan's hosts.
        gpus: `NodePlan.gpus` of this host; the plan has those of none, as it is the same for all hosts.
        mark: file in the plan's run folder by which a host sees that it shares it, see `agent/job_files.py`; empty for
            none.
        config: text of the training config, as the front end has checked it; None where there is none. A host that does
            not share the job's folder may have another file of that name, or none. See [Note: raw text].
        version: version of the protocol.
    """

    plan: dict[str, Any]
    node_rank: int
    gpus: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    mark: str = ""
    config: str | None = None
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Front end to agent: send `signal` to every rank, and kill what is left when the plan's grace is over."""

    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Front end to agent: kill everything now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Front end to the agents of all hosts but the first: where the rendezvous store is. They start their ranks now."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Front end to the first host's agent, once all other agents have answered: who may come to the rendezvous store.

    Attributes:
        addresses: addresses of each other host, in rank order, as its `Hello` told them.
    """

    addresses: list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Front end to agent, several times within the plan's lease: go on. Without one for that long, all is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Front end to agent: pass `signal` to the ranks that catch it, as the user sent it to dsrun; stops nothing.

    Attributes:
        signal: its number.
        rank: the one rank that it is for; None for all.
    """

    signal: int
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStacks:
    """Front end to agent: say where every rank is; the answer is `Stacks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Agent to front end, the reply to `Start`.

    Attributes:
        pid: the agent's.
        time_s: its clock, seconds since the epoch.
        own_folder: the host does not share the job's folder, so that records come as `Records`.
        addresses: addresses by which other hosts may see this one; see [Note: strangers].
        version: version of the protocol.
    """

    pid: int
    time_s: float
    own_folder: bool = False
    addresses: list[str] = field(default_factory=list[str])
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Spawner to agent to front end: every rank of the host runs; pids in the order of the node's workers."""

    pids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """First host's agent to front end: the rendezvous store's socket is bound; sent before its ranks start."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """How one rank fares.

    Attributes:
        rank: number of the rank.
        beats: number of heartbeats so far, see `dsrun.contract.heartbeats`; 0 if there was none.
        step: optimizer steps it has finished; None where it does not say.
        idle_s: seconds since its last beat; None if it never has.
        waited_s: seconds it has waited in collectives so far.
        phase: phase that the rank says it is in, `forward` for example; empty if it said none.
        collective: the one it waits in; empty while it is in none.
        cpu_percent: processor time since the pulse before, in percent of one core.
        rss_bytes: memory it has resident.
        starting: stage of the rank's start: `interpreter` or `torch` while it starts or imports torch, empty once its
            program runs.
        longest_wait: the collective that it has waited in longest in its last steps; empty where it does not say.
        longest_wait_s: seconds a step that it has waited there.
        step_s: seconds that such a step took.
        stage: number of its pipeline stage.
        stages: number of pipeline stages; 0 where it says nothing of stages.
        schedule_wait: share of a step that the schedule has ranks wait if all chunks take the same time.
        stage_wait_s: seconds a step that it has waited for ranks of other stages in its last steps.
        coordinate: place of the rank on the axes of the job, `data 1, tensor 0` for example; empty where its number
            says it, or it does not say.
    """

    rank: int
    beats: int
    step: int | None
    idle_s: float | None
    waited_s: float
    phase: str
    collective: str
    cpu_percent: float
    rss_bytes: int
    starting: Starting = ""
    longest_wait: str = ""
    longest_wait_s: float = 0.0
    step_s: float = 0.0
    stage: int = 0
    stages: int = 0
    schedule_wait: float = 0.0
    stage_wait_s: float = 0.0
    coordinate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Agent to front end, about every second once ranks run: the host lives, and so do these ranks.

    Attributes:
        ranks: those that have not ended.
        time_s: time when the ranks were looked at, by the host's clock, seconds since the epoch.
        importing: ranks that are there once the host's spawner has imported torch for them.
    """

    ranks: list[RankStatus]
    time_s: float
    importing: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Agent to front end, the reply to `Signal`: which ranks got it; the others do not catch it and would have died."""

    signal: int
    ranks: list[int]
    spared: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a process group, or one send or receive, as torch's flight recorder has it.

    Attributes:
        number: number among the group's collectives, or among its sends and receives; ranks that agree count alike.
        name: `all_reduce`, `send 0->1`.
        data: sizes and types that must be the same on all ranks, as one text: `[1024] Float`; empty where these may
            differ.
        state: `scheduled` on the device's queue, `started` where torch keeps times, or `completed`.
        line: line of the user's code that called the collective, `train.py:30`; empty where that is not known.
    """

    number: int
    name: str
    data: str
    state: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far one rank is in one process group, as torch's flight recorder has it.

    Attributes:
        name: torch's own for the group, the same on all its ranks.
        label: name of the group for people; empty where it was given none.
        members: ranks of the job, like `0-3,6`; empty where torch does not say.
        queued: last collective that the rank has called.
        completed: last one that is done.
        waits: first one that it called and that is not done.
        transfer: its last send or receive, if that is not done.
    """

    name: str
    label: str
    members: str
    queued: Collective | None = None
    completed: Collective | None = None
    waits: Collective | None = None
    transfer: Collective | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """Where one rank is.

    Attributes:
        rank: number of the rank.
        state: letter of the process's state in /proc (`R`, `S`, `D`, `T`); empty if it has ended.
        kernel: kernel function it sleeps in, where the kernel says; else empty.
        text: stacks of all threads as faulthandler wrote them; empty where the rank cannot answer (stopped, no Python).
        phase: phase that the rank says it is in, `forward` for example; empty if it said none. See `RankStatus`.
        collective: collective that the rank waits in; empty while it is in none. See `RankStatus`.
        step: optimizer steps that the rank has finished; None where it does not say. See `RankStatus`.
        idle_s: seconds since the rank's last heartbeat; None if it never has beaten. See `RankStatus`.
        uses_gpu: whether the rank has an NVIDIA GPU open, so that it may be waiting for the GPU where it seems to
            compute.
        uses_nccl: NCCL's watchdog runs in it, so that its GPU may be waiting for other ranks.
        groups: its process groups, the one that it has waited in longest first; None where it left no dump.
        dump_error: reason why there is no dump though there should be one; empty otherwise.
        dump: path of its flight recorder's dump on its host; empty where it has no recorder.
    """

    rank: int
    state: str
    kernel: str
    text: str
    phase: str
    collective: str
    step: int | None
    idle_s: float | None
    uses_gpu: bool = False
    uses_nccl: bool = False
    groups: list[GroupProgress] | None = None
    dump_error: str = ""
    dump: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Agent to front end, the reply to `TakeStacks`, within 16 s: the host's ranks that have not ended."""

    ranks: list[RankStack]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Agent to front end: bytes of one rank's stream in order of arrival. See [Note: raw text].

    Attributes:
        rank: rank that wrote the bytes.
        stream: stream to which the bytes were written.
        sequence: number of the frame among this rank's frames, from 0, both streams together.
        time_s: time when the agent read the bytes, by its clock.
        text: the bytes; several lines, or part of one.
    """

    rank: int
    stream: StreamName
    sequence: int
    time_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Agent to front end: what a rank does with its stdin; comes after all that it wrote before.

    Attributes:
        rank: number of the rank.
        state: state of the rank's reading of stdin, see `ReadingState`.
    """

    rank: int
    state: ReadingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Agent to front end: what rank 0 appended to its records, where the front end cannot read them. Whole lines; only
    a line of megabytes comes in pieces. See [Note: raw text].
    """

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraceBytes:
    """Agent to front end: a piece of the profile of a rank, where the front end cannot read it; in order, once no rank
    of the host writes any more.

    Attributes:
        rank: number of the rank.
        offset: place of the piece in the file.
        data: the bytes, in base64.
        is_last: no piece of this profile follows.
    """

    rank: int
    offset: int
    data: str
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Agent to front end: a line about the host, for people."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """Processes of a host were killed for want of memory.

    Attributes:
        by: origin of the kill: a group's `limit`; the `machine` out of memory; `above`, one of both that a container
            cannot tell apart; `systemd-oomd`.
        group: the control group that had the limit, or that systemd-oomd ended; empty for the others.
        limit_bytes: the group's limit; None where a group below it has it.
        kills_whole_group: the kernel ends all processes of the group at once (memory.oom.group).
    """

    by: Literal["limit", "machine", "above", "systemd-oomd"]
    group: str = ""
    limit_bytes: int | None = None
    kills_whole_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Spawner to agent to front end: a rank ended.

    Attributes:
        rank: number of the rank.
        status: exit code, or minus the signal's number.
        time_s: time when the rank was reaped, by the host's clock.
        error: contents of the error file that the rank itself wrote; None without one. Added by the agent.
        oom: the last kill for want of memory on the host, if it was just before; added by the agent. A SIGKILL that
            nobody sent has its cause in it.
        step: optimizer steps it had finished, as it said itself; None where it said nothing. Added by the agent, as
            the last pulse may be older.
        groups: progress in each process group, from the dump that torch left when it ended the rank; None without a
            dump. Added by the agent, see `RankStack`.
        coordinate: place of the rank on the axes of the job; empty for none. Added by the agent, see `RankStatus`.
        phase: phase that the rank said it was in; empty if it said none. Added by the agent, see `RankStatus`.
        collective: collective that the rank waited in; empty if it was in none. Added by the agent, see `RankStatus`.
    """

    rank: int
    status: int
    time_s: float
    error: WorkerError | None = None
    oom: OomKill | None = None
    step: int | None = None
    groups: list[GroupProgress] | None = None
    coordinate: str = ""
    phase: str = ""
    collective: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFinding:
    """What a driver says of a GPU after a rank died.

    Attributes:
        index: NVML's; None where the driver does not show it.
        uuid: its name.
        address: GPU's PCI address, `0000:1b:00.0`; None where the driver does not reach the GPU.
        ranks: those that used it.
        faults: descriptions in words of the GPU's faults; empty if nothing is known.
    """

    index: int | None = None
    uuid: str | None = None
    address: str | None = None
    ranks: list[int] = field(default_factory=list[int])
    faults: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFindings:
    """Agent to front end, after the `Exit` of a rank that may have died of its GPU.

    Attributes:
        rank: rank that may have died of its GPU.
        gpus: those of the host's ranks, and others with a fault.
    """

    rank: int
    gpus: list[GpuFinding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Spawner to agent to front end: this host cannot run its ranks any more.

    Attributes:
        reason: reason in words why the host cannot run its ranks any more.
        time_s: since when, by the host's clock; ranks that end later did so because of it.
        hint: a way out, where one is known.
        is_mistake: bad input is the reason, so that another try would fail as well.
    """

    reason: str
    time_s: float
    hint: str | None = None
    is_mistake: bool = False


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
        plan: plan of the launch, as `LaunchPlan.to_json` wrote it; see `Start`.
        node_rank: rank of this host among the plan's hosts; see `Start`.
        agent_pid: pid that the spawner's parent must have; another parent means that the agent is dead.
        master_addr: address of the rendezvous store.
        master_port: its port.
        store_fd: the listening socket to serve it on; None where another host does.
        output_fds: write ends of the pipes for stdout and stderr of each worker, in the order of the node's workers.
        cpus: CPUs each worker may run on, in the same order; None where it may use all that the spawner may.
        stdin_fd: descriptor for the stdin of the worker with the plan's `stdin_rank`; None where all workers get an
            empty stdin.
        own_folder: the plan's run folder is the host's own; the spawner removes it should the agent die.
    """

    plan: dict[str, Any]
    node_rank: int
    agent_pid: int
    master_addr: str
    master_port: int
    store_fd: int | None
    output_fds: list[tuple[int, int]]
    cpus: list[list[int] | None]
    stdin_fd: int | None = None
    own_folder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Agent to spawner, last message: nothing is left below you, exit. An end of file without it means kill."""


Message = (
    Start
    | Meet
    | Peers
    | Lease
    | Stop
    | Kill
    | Signal
    | TakeStacks
    | Hello
    | Listening
    | Started
    | Pulse
    | Output
    | Reading
    | Passed
    | Stacks
    | Records
    | RankTraceBytes
    | Note
    | Exit
    | GpuFindings
    | Failed
    | Finished
    | Spawn
    | Release
)

_CLASS_OF: dict[str, type[Message]] = {
    "start": Start,
    "meet": Meet,
    "peers": Peers,
    "lease": Lease,
    "stop": Stop,
    "kill": Kill,
    "signal": Signal,
    "take_stacks": TakeStacks,
    "hello": Hello,
    "listening": Listening,
    "started": Started,
    "pulse": Pulse,
    "output": Output,
    "reading": Reading,
    "passed": Passed,
    "stacks": Stacks,
    "records": Records,
    "rank_trace": RankTraceBytes,
    "note": Note,
    "exit": Exit,
    "gpu_findings": GpuFindings,
    "failed": Failed,
    "finished": Finished,
    "spawn": Spawn,
    "release": Release,
}
_NAME_OF = {cls: name for name, cls in _CLASS_OF.items()}
_FIELDS_OF = {cls: tuple(each.name for each in fields(cls)) for cls in _CLASS_OF.values()}


def encode(message: Message) -> bytes:
    """Returns one frame: ASCII JSON and a newline."""
    cls = type(message)
    # A shallow dict: `asdict` copies deeply, which costs more than everything else on the output path.
    body: dict[str, Any] = {name: getattr(message, name) for name in _FIELDS_OF[cls]}
    match message:
        case Exit(error=error, groups=groups, oom=oom):
            body["error"] = None if error is None else asdict(error)
            body["groups"] = _plain(groups)
            body["oom"] = None if oom is None else asdict(oom)
        case Pulse(ranks=ranks) | Stacks(ranks=ranks):
            body["ranks"] = [asdict(rank) for rank in ranks]
        case GpuFindings(gpus=gpus):
            body["gpus"] = [asdict(gpu) for gpu in gpus]
        case _:
            pass
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
        if cls is Exit:
            body["error"] = None if body["error"] is None else WorkerError(**body["error"])
            body["groups"] = _groups(body["groups"])
            body["oom"] = None if body["oom"] is None else OomKill(**body["oom"])
        elif cls is Stacks:
            body["ranks"] = [_stack(rank) for rank in body["ranks"]]
        elif cls is GpuFindings:
            body["gpus"] = [GpuFinding(**gpu) for gpu in body["gpus"]]
        elif cls is Pulse:
            body["ranks"] = [RankStatus(**rank) for rank in body["ranks"]]
        return cls(**body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        shown = line[:200].decode("utf-8", "backslashreplace").rstrip()
        raise ProtocolError(f"protocol: expected a message of version {VERSION}, got {shown!r}") from error


def _stack(value: dict[str, Any]) -> RankStack:
    value["groups"] = _groups(value["groups"])
    return RankStack(**value)


def _plain(groups: list[GroupProgress] | None) -> list[dict[str, Any]] | None:
    return None if groups is None else [asdict(group) for group in groups]


def _groups(values: list[dict[str, Any]] | None) -> list[GroupProgress] | None:
    if values is None:
        return None
    return [
        GroupProgress(
            name=value["name"],
            label=value["label"],
            members=value["members"],
            queued=_collective(value["queued"]),
            completed=_collective(value["completed"]),
            waits=_collective(value["waits"]),
            transfer=_collective(value["transfer"]),
        )
        for value in values
    ]


def _collective(value: dict[str, Any] | None) -> Collective | None:
    return None if value is None else Collective(**value)


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
