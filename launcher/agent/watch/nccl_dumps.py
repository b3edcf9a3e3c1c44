"""What torch's flight recorder says of one rank: the bytes of its dump become a few facts for each process group.

The agent's side; who is behind is judged where all ranks' facts are, in `failures/nccl_report.py`. Pure: no I/O.

[Note: dump] A dump is a pickle of dictionaries, lists, texts and numbers (torch's FlightRecorder.hpp; version 2.x), or
the same as JSON. A rank wrote it, maybe while it died, and it may be of any size: it is never trusted. What it is made
of is looked at before anything is built, nothing of it can name a class or a function, and a dump that is broken,
foreign or too large is told in words.

[Note: what is done] NCCL marks a collective `completed` once its watchdog saw it done; those of one group run one after
another, so what comes before a completed one is done as well, also members of a coalesced call, which torch never
marks. Gloo marks none, and takes those that are done out of its list (`retired`). Without TORCH_NCCL_ENABLE_TIMING
nothing is ever `started`.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...failures.stack_frames import Frame
from ...number_ranges import number_ranges
from ...protocol import Collective, GroupProgress

#: A larger dump is not read: two thousand collectives with their stacks take half a megabyte to three.
MOST_BYTES = 32 << 20
#: Nor one of more steps of a pickle, which take a second and a half. Whoever reads says nothing meanwhile, and eight
#: ranks that end together have their dumps read in less than its lease.
MOST_STEPS = 3_000_000
#: More groups of a rank are not told.
_MOST_GROUPS = 64
_MOST_NAME = 80
_MOST_DATA = 400
#: More characters of a group's ranks are left out, as if torch had not said them.
_MOST_MEMBERS = 16_000
_MOST_DIMS = 16
#: All that torch's pickler writes for plain values, and what Python's would.
_PLAIN_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    )
)
#: torch's names of collectives whose sizes and types are the same on all ranks, and what one calls them.
_SAME_DATA = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce_barrier": "barrier",
}


class DumpError(Exception):
    """These bytes are no dump; the message says why, as the end of a sentence."""


def read_dump(data: bytes) -> list[GroupProgress]:
    """Returns how far a rank is in each of its groups, the one that it has waited in longest first.

    Args:
        data: a whole dump. See [Note: dump].

    Raises:
        DumpError: it is none, or one of another version.
    """
    if len(data) > MOST_BYTES:
        raise DumpError(f"has more than {MOST_BYTES >> 20} MiB")
    dump = _load(data)
    version = dump.get("version")
    if not isinstance(version, str):
        raise DumpError("names no version")
    if version.partition(".")[0] != "2":
        raise DumpError(f"is of version {version[:20]!r}; versions 2.x are known")
    try:
        members = _members(_mapping(dump.get("pg_config", {})))
        groups: dict[str, list[_Entry]] = {}
        for value in _sequence(dump.get("entries", [])):
            entry = _Entry.of(_mapping(value))
            groups.setdefault(entry.group, []).append(entry)
        reports = [_report(name, entries, members.get(name, "")) for name, entries in groups.items()]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise DumpError(f"has an entry that is none: {type(error).__name__}: {str(error)[:80]}") from error
    return [progress for _, progress in sorted(reports, key=lambda report: report[0])[:_MOST_GROUPS]]


def _load(data: bytes) -> Mapping[str, Any]:
    try:
        value: object = json.loads(data) if data[:1] == b"{" else _unpickle(data)
    except DumpError:
        raise
    except (
        ValueError,
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise DumpError(f"is damaged: {type(error).__name__}: {str(error)[:80]}") from error
    except pickle.UnpicklingError as error:
        raise DumpError(f"is damaged: {str(error)[:80]}") from error
    if not isinstance(value, dict):
        raise DumpError("holds no dictionary")
    return cast("dict[str, Any]", value)


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain values alone."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise DumpError(f"names {module_name}.{global_name}, as no dump does")


def _unpickle(data: bytes) -> object:
    if data[:1] != b"\x80":
        raise DumpError("is neither a pickle nor JSON")
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in _PLAIN_OPCODES:
            raise DumpError(f"holds more than plain values (pickle opcode {opcode.name})")
        if opcode.name == "LONG_BINPUT" and cast("int", argument) > count:
            # The unpickler makes room for so many, whatever comes.
            raise DumpError(f"is damaged: it counts {argument} values after {count} steps")
        if count > MOST_STEPS:
            raise DumpError(
                f"holds more than {MOST_STEPS} values and names; a smaller TORCH_FR_BUFFER_SIZE keeps fewer"
            )
    return _PlainUnpickler(io.BytesIO(data)).load()


@dataclass(frozen=True, slots=True)
class _Entry:
    group: str
    label: str
    is_transfer: bool
    is_done: bool
    created_ns: int
    collective: Collective

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> _Entry:
        group = _sequence(value["process_group"])
        backend, _, call = _text(value["profiling_name"]).rpartition(":")
        state, is_transfer = _text(value["state"]), value.get("is_p2p") is True
        return cls(
            group=_text(group[0]),
            label=_label(_text(group[1])),
            is_transfer=is_transfer,
            is_done=state == "completed" or (backend == "gloo" and value.get("retired") is True),
            created_ns=_whole(value.get("time_created_ns", 0)),
            collective=Collective(
                number=_whole(value["p2p_seq_id" if is_transfer else "collective_seq_id"]),
                name=_SAME_DATA.get(call, call),
                data=_data(value) if call in _SAME_DATA else "",
                state=state,
                line=_line(value),
            ),
        )


def _label(text: str) -> str:
    return "" if text == "undefined" else text


def _data(value: Mapping[str, Any]) -> str:
    sides: list[str] = []
    for side in ("input", "output"):
        shapes = [_sequence(one)[:_MOST_DIMS] for one in _sequence(value.get(f"{side}_sizes", []))[:8]]
        sizes = [str([_whole(size) for size in shape]) for shape in shapes]
        types = [_text(one)[:20] for one in _sequence(value.get(f"{side}_dtypes", []))[:8]]
        kinds = types if len(set(types)) > 1 else types[:1]
        sides.append(" ".join([",".join(sizes), ",".join(kinds)]).strip())
    return (sides[0] if sides[0] == sides[1] else " -> ".join(sides))[:_MOST_DATA]


def _line(value: Mapping[str, Any]) -> str:
    """Returns the user's innermost line; `frames` come innermost first."""
    for one in _sequence(value.get("frames", [])):
        frame = _mapping(one)
        found = Frame(_text(frame["filename"], most=4096), _whole(frame["line"]), _text(frame["name"]))
        if found.is_users:
            return found.place[-_MOST_NAME:]
    return ""


def _report(name: str, entries: Sequence[_Entry], members: str) -> tuple[float, GroupProgress]:
    """Returns since when the rank has waited in this group, endless where it does not, and how far it is."""
    collectives = [entry for entry in entries if not entry.is_transfer]
    done = max((entry.collective.number for entry in collectives if entry.is_done), default=-1)
    # The last of one number: the whole of a coalesced call comes after its members.
    completed = [entry for entry in collectives if entry.collective.number == done]
    pending = [entry for entry in collectives if entry.collective.number > done]
    first = min((entry.collective.number for entry in pending), default=-1)
    waits = [entry for entry in pending if entry.collective.number == first]
    transfers = [entry for entry in entries if entry.is_transfer]
    transfer = transfers[-1] if transfers and not transfers[-1].is_done else None
    since = [entry.created_ns for entry in (*waits[-1:], *([transfer] if transfer else []))]
    return min(since, default=float("inf")), GroupProgress(
        name=name,
        label=entries[-1].label,
        members=members,
        queued=max(collectives, key=lambda entry: entry.collective.number).collective if collectives else None,
        completed=completed[-1].collective if completed else None,
        waits=waits[-1].collective if waits else None,
        transfer=transfer.collective if transfer is not None else None,
    )


def _members(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns each group's ranks as short text; torch writes them as the text of a list."""
    found: dict[str, str] = {}
    for name, value in config.items():
        ranks: Any = json.loads(_text(_mapping(value).get("ranks", "[]"), most=MOST_BYTES))
        ranges = number_ranges(sorted({_whole(rank) for rank in _sequence(ranks)}))
        found[_text(name)] = ranges if len(ranges) <= _MOST_MEMBERS else ""
    return found


def _text(value: object, *, most: int = _MOST_NAME) -> str:
    # Not `str`: lists of lists that share parts are small as a pickle and endless as a text.
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return value[:most]


def _whole(value: object) -> int:
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    number = int(value)
    if number.bit_length() > 64:
        raise ValueError("a number has more than 64 bits")
    return number


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a dictionary, got {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _sequence(value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return cast("Sequence[Any]", value)
