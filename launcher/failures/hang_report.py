"""Who hangs where: ranks grouped by the place they are at, the odd ones out first. Pure: stacks in, lines out. Who is
behind whom in a process group is judged in `nccl_report.py`.

Reads the text of `faulthandler` as Python 3.10 to 3.14 write it. Does not judge whether a job hangs; see `hang`.

[Note: who waits for a GPU] NCCL's collectives run on the GPU, so a rank that waits for another one waits in its next
read from its GPU, or in a launch, once the queue of kernels is full. CUDA spins there, below whatever line of Python
that is: by its state and its stack alone such a rank computes. Where NCCL's watchdog runs in the process it is as
likely a victim, and never the odd one out.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsrun.contract.job_paths import JobPaths
from dsrun.units import format_duration

from ..number_ranges import named_ranks, number_ranges
from ..protocol import RankStack
from .coordinates import common_coordinate, named_group
from .nccl_report import findings, lines_of, name_of_wait
from .rank_actions import MOST_GROUPS, action_of, with_sources, without_source
from .stack_frames import Frame

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(?P<current>Current t|T)hread 0x[0-9a-f]+")
#: Module of the thread that writes a rank's stacks.
_ANSWERS = "dsrun/launcher/agent/start/stack_answers.py"


def main_thread(text: str) -> tuple[Frame, ...]:
    """Returns the stack of a process's main thread, innermost first; empty where the text has none.

    Args:
        text: one dump of faulthandler, all threads.
    """
    threads: list[list[Frame]] = []
    current: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            threads.append([])
            if thread["current"] != "T":
                current = threads[-1]
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    # The kernel gives a signal to the main thread if it can, so that one is the current one. Else it is the last, for
    # threads come newest first; so it is where the current one is that which answers.
    if current and current[-1].file.endswith(_ANSWERS):
        current = []
    return tuple(current or (threads[-1] if threads else ()))


_C10D = "torch/distributed/distributed_c10d.py"
#: What a place waits for: other ranks, its GPU, or the threads of a backward, which may be waiting for either.
_Waits = Literal["", "ranks", "gpu", "backward"]
#: Where a library waits: end of the file's name, function, what one calls it, and what is waited for there. `{}` stands
#: for the function's own name.
_PLACES: tuple[tuple[str, str, str, _Waits], ...] = (
    ("torch/utils/data/dataloader.py", r"__next__", "DataLoader.__next__", ""),
    (
        _C10D,
        r"init_process_group|new_group|_new_process_group_helper|_store_based_barrier",
        "init_process_group",
        "ranks",
    ),
    ("torch/distributed/rendezvous.py", r".*", "init_process_group", "ranks"),
    (_C10D, r"(monitored_)?barrier|all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|i?send|i?recv", "{}", "ranks"),
    ("dsrun/runtime/mesh/collectives.py", r"[a-z]\w*", "{}", "ranks"),
    ("dsrun/runtime/mesh/host_memory/collectives.py", r"[a-z]\w*", "{}", "ranks"),
    ("dsrun/runtime/checkpoint/save/saver.py", r"save", "saving a checkpoint", ""),
    ("torch/cuda/__init__.py", r"synchronize", "torch.cuda.synchronize", "gpu"),
    ("torch/cuda/streams.py", r"synchronize", "torch.cuda synchronize", "gpu"),
    ("torch/autograd/graph.py", r"_engine_run_backward", "backward", "backward"),
    ("subprocess.py", r"wait|communicate|_try_wait", "subprocess.wait", ""),
    ("concurrent/futures/_base.py", r"result", "Future.result", ""),
    ("multiprocessing/queues.py", r"get", "Queue.get", ""),
    ("multiprocessing/connection.py", r"recv\w*|poll", "Connection.recv", ""),
    ("queue.py", r"get|put|join", "Queue.{}", ""),
    ("threading.py", r"join", "Thread.join", ""),
    ("threading.py", r"wait", "Event.wait", ""),
    ("socket.py", r".*", "socket.{}", ""),
    ("ssl.py", r"read|recv\w*", "socket.{}", ""),
    ("asyncio/base_events.py", r"run_\w+", "asyncio.{}", ""),
)


class _Kind(enum.IntEnum):
    """How odd it is to be there; the oddest first."""

    STOPPED = 0
    KERNEL = 1
    SILENT = 2
    ELSEWHERE = 3
    GPU = 4
    COLLECTIVE = 5
    WELL = 6


@dataclass(frozen=True, slots=True)
class _Spot:
    kind: _Kind
    where: str
    #: It may compute as well.
    may_compute: bool = False


def verdict(
    stacks: Sequence[tuple[str, RankStack]],
    *,
    silent_s: float,
    headline: str | None = None,
    late: str = "",
    ended: Sequence[int] = (),
    unanswered: Sequence[str] = (),
    coordinates: Mapping[int, str] | None = None,
    stacks_folder: str | None = None,
    dumps: Sequence[str] = (),
) -> tuple[str, ...]:
    """Says who is where.

    Args:
        stacks: host and answer of every rank that runs.
        silent_s: seconds without progress; where torch ends a rank, the seconds that this rank has waited.
        headline: beginning of the first line where torch ends a rank, which makes all ranks leave dumps; None where the
            line is to say that there was no progress.
        late: sentence about the ranks that have not started, where the others wait for them; empty otherwise. There may
            be no stack then.
        ended: ranks that have returned 0 already.
        unanswered: hosts that did not say.
        coordinates: place on the axes of the job of each rank that has said one, by its number; None for none.
        stacks_folder: the job's folder, where the complete stacks of the ranks of all hosts are.
        dumps: places of the dumps of the ranks' flight recorders, as host and path.

    Returns:
        lines; the first one says it all.
    """
    coordinates = coordinates or {}
    groups: dict[_Spot, list[tuple[str, RankStack]]] = {}
    for host, stack in sorted(stacks, key=lambda entry: entry[1].rank):
        # One that ended between the question and the answer, or since then, is no riddle.
        if not is_gone(stack) and stack.rank not in ended:
            spot = _spot_of(stack)
            if spot.kind is _Kind.ELSEWHERE and stack.idle_s is not None and stack.idle_s < silent_s / 2:
                # It beat when the others had long stopped to; one in a collective may have come there late, and waits.
                spot = _Spot(_Kind.WELL, "")
            groups.setdefault(spot, []).append((host, stack))
    found = findings({stack.rank: stack.groups for _, stack in stacks if stack.groups is not None})
    ordered = sorted(groups.items(), key=lambda group: (group[0].kind, len(group[1]), group[1][0][1].rank))
    facts = [f"{named_group(ended, coordinates)} {'has' if len(ended) == 1 else 'have'} ended already"] if ended else []
    # Who called something else than the others may look as they do: all wait.
    facts += [one.text for one in found if one.is_mismatch][:1]
    nobody_else = not (facts or unanswered or late)
    if len(ordered) > 1 and nobody_else and all(spot.kind is _Kind.COLLECTIVE for spot in groups):
        # Nobody is the odd one out: ranks have called different things, or something is lost on its way.
        facts.append("all ranks wait")
    facts += [_sentence(spot, [stack for _, stack in group], coordinates) for spot, group in ordered[:MOST_GROUPS]]
    if len(ordered) > MOST_GROUPS:
        facts.append(f"others at {len(ordered) - MOST_GROUPS} more places")
    facts += [f"host {host} does not answer" for host in sorted(unanswered)]
    begin = headline or late or f"no progress for {format_duration(silent_s)}"
    told = ", ".join(facts) or ("" if late else "all ranks are gone, and no host says how")
    lines = [f"{begin}: {told}" if told else begin]
    lines += [f"  {_detail(group, coordinates)}" for _, group in ordered[:MOST_GROUPS]]
    lines += [f"  {line}" for line in lines_of(found)]
    lines += [f"  the flight recorder's dump of {line}" for line in _dump_errors(stacks)]
    if dumps and (headline or any(stack.groups is not None for _, stack in stacks)):
        lines.append(f"all collectives: {', '.join(dumps)}")
    if stacks_folder is not None and any(stack.text for _, stack in stacks):
        lines.append(f"all threads: {JobPaths(Path(stacks_folder)).stacks('<N>')}")
    return tuple(lines)


def is_gone(stack: RankStack) -> bool:
    """Whether the rank had ended when it was asked, or was about to."""
    return stack.state in ("", "Z", "X")


def _spot_of(stack: RankStack) -> _Spot:
    name, waits_for = _name_of(main_thread(stack.text))
    if stack.state in ("T", "t"):
        return _Spot(_Kind.STOPPED, "stopped (SIGSTOP or a debugger)")
    if stack.state == "D":
        kernel = f" ({stack.kernel})" if stack.kernel else ""
        return _Spot(_Kind.KERNEL, f"in the kernel{kernel}" + (f", from {name}" if name else ""))
    if stack.collective:
        return _Spot(_Kind.COLLECTIVE, without_source(stack.collective))
    if stack.groups and (wait := name_of_wait(stack.groups)) and _may_read_from_gpu(stack):
        return _Spot(_Kind.COLLECTIVE, wait)
    if not name:
        doing = "computing" if stack.state == "R" else "waiting"
        return _Spot(_Kind.SILENT, f"{doing}, without a Python stack to show")
    if waits_for == "ranks":
        return _Spot(_Kind.COLLECTIVE, name)
    spins = stack.state == "R" and _may_read_from_gpu(stack)
    if stack.uses_nccl and (waits_for or spins):
        # See [Note: who waits for a GPU].
        return _Spot(_Kind.GPU, name, may_compute=waits_for != "gpu")
    if waits_for == "gpu":
        return _Spot(_Kind.ELSEWHERE, f"waiting for the GPU in {name}")
    busy = "busy, or waits for its GPU," if stack.uses_gpu and spins else "busy"
    return _Spot(_Kind.ELSEWHERE, f"{busy} in {name}" if stack.state == "R" else f"in {name}")


def _may_read_from_gpu(stack: RankStack) -> bool:
    """Whether the host may be reading from its device: no call of Python's own or of a library says else.

    A read is a call of C, so the innermost line of Python is the one that reads: the script's, dsrun's or torch's.
    """
    frames = main_thread(stack.text)
    return not frames or frames[0].is_users or frames[0].place.startswith(("torch/", "dsrun/runtime/"))


def _dump_errors(stacks: Sequence[tuple[str, RankStack]]) -> list[str]:
    """Says of which ranks there is no dump though they were asked, those with the same reason together."""
    ranks: dict[str, list[int]] = {}
    for _, stack in sorted(stacks, key=lambda entry: entry[1].rank):
        if stack.dump_error:
            ranks.setdefault(stack.dump_error, []).append(stack.rank)
    return [f"{named_ranks(those)} {error}" for error, those in ranks.items()]


def _name_of(frames: Sequence[Frame]) -> tuple[str, _Waits]:
    """Returns what one calls the place, and what is waited for there, where that is known."""
    if not frames:
        return "", ""
    users = next((number for number, frame in enumerate(frames) if frame.is_users), len(frames))
    # What the user's code called, seen from there: it is called by a name that users know.
    for frame in reversed(frames[:users]):
        for ending, function, name, waits_for in _PLACES:
            if frame.file.endswith(f"/{ending}") and re.fullmatch(function, frame.function):
                return f"{name.format(frame.function)} ({frame.place})", waits_for
    frame = frames[users] if users < len(frames) else frames[0]
    return f"{frame.function} ({frame.place})", ""


def _sentence(spot: _Spot, stacks: Sequence[RankStack], coordinates: Mapping[int, str]) -> str:
    subject, is_one = named_group([stack.rank for stack in stacks], coordinates), len(stacks) == 1
    if spot.kind is _Kind.WELL:
        return f"{subject} {'goes' if is_one else 'go'} on"
    if spot.kind is _Kind.COLLECTIVE:
        where = with_sources(spot.where, [stack.collective for stack in stacks], coordinates)
        return f"{subject} {'waits' if is_one else 'wait'} in {where}"
    if spot.kind is _Kind.GPU:
        waits, computes = ("waits", "computes") if is_one else ("wait", "compute")
        computes = f", or {computes}," if spot.may_compute else ""
        return f"{subject} {waits} for the GPU{computes} in {spot.where}"
    actions = {action_of(stack.phase, stack.collective) for stack in stacks}
    during = f" during {action}" if len(actions) == 1 and (action := actions.pop()) else ""
    return f"{subject} {'is' if is_one else 'are'} {spot.where}{during}"


def _detail(group: Sequence[tuple[str, RankStack]], coordinates: Mapping[int, str]) -> str:
    """One line about a group: who, and what its first rank was doing."""
    host, first = group[0]
    hosts = {host for host, _ in group}
    where = host if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = [stack.rank for _, stack in group]
    numbers = f"{'rank' if len(group) == 1 else 'ranks'} {number_ranges(ranks)}"
    who = f"{numbers}{common_coordinate(ranks, coordinates)} on {where}"
    user = next((frame for frame in main_thread(first.text) if frame.is_users), None)
    parts = [] if user is None else [f"in {user.function} ({user.file}:{user.line})"]
    parts += [f"step {first.step}"] if first.step is not None else []
    parts += [f"phase {first.phase}"] if first.phase else []
    parts += ["no heartbeat" if first.idle_s is None else f"last heartbeat {format_duration(first.idle_s)} ago"]
    return f"{who}: {', '.join(parts)}"
