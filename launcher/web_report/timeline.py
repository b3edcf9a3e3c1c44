"""What happened to a job, in order: lanes for a plot, and rows with their times. Reads the events it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dsrun.units import format_bytes, format_duration

from ..failures.report import describe_status
from .plots import Key, Plot, Span, lanes_plot

#: Rows of the table; a job that was started again a hundred times has its last ones.
_MOST_ROWS = 60


@dataclass(frozen=True, slots=True)
class Happening:
    """One row of the timeline.

    Attributes:
        at_s: Seconds since the job was made.
        clock: Date and time.
        text: Description of the event.
        is_bad: Whether it is a failure or a delay.
    """

    at_s: float
    clock: str
    text: str
    is_bad: bool = False


def happenings(events: Sequence[Mapping[str, Any]], created: datetime) -> list[Happening]:
    """Returns the rows of a timeline, the newest if there are many.

    Args:
        events: Events of the job, in order of time.
        created: Time when the job was made.
    """
    rows: list[Happening] = []
    for event in events:
        at_s = event["time"] - created.timestamp()
        clock = datetime.fromtimestamp(event["time"], created.tzinfo).strftime("%Y-%m-%d %H:%M:%S")
        text = _text(event)
        if text:
            rows.append(Happening(at_s, clock, text, event["event"] in _BAD))
    return rows[-_MOST_ROWS:]


_BAD = frozenset({"rank_exit", "hang", "host_lost", "kill", "straggler", "restart"})


def _text(event: Mapping[str, Any]) -> str:
    match event:
        case {"event": "waiting", "text": str(text)}:
            return text
        case {"event": "start", "attempt": int(attempt)}:
            resume = event.get("resume")
            ranks, hosts = event.get("world_size", "?"), event.get("hosts")
            on = f" on {len(hosts)} host{'s' * (len(hosts) != 1)}" if isinstance(hosts, list) else ""
            return f"attempt {attempt + 1} starts: {ranks} ranks{on}{f', from {resume}' if resume else ''}"
        case {"event": "rank_exit", "rank": int(rank), "status": int(status)}:
            host = f" on {event['host']}" if event.get("host") else ""
            return f"rank {rank}{host} {describe_status(status)}"
        case {"event": "restart", "why": str(why)}:
            return f"to be started again after {format_duration(float(event.get('wait_s') or 0))}: {why}"
        case {"event": "hang", "lines": [str(first), *_]}:
            return first
        case {"event": "straggler", "rank": int(rank), "ratio": int() | float() as ratio}:
            return f"rank {rank} is steadily slower than the others, {ratio:g} times their median"
        case {"event": "host_lost", "host": str(host)}:
            return f"host {host} is lost: {event.get('reason', 'no reason is known')}"
        case {"event": "kill"}:
            return f"the ranks are killed: {event.get('why', '')}"
        case {"event": "stop"}:
            return f"the ranks are stopped: {event.get('why', '')}"
        case {"event": "end", "outcome": str(outcome)}:
            return f"{outcome}, exit code {event.get('exit_code', '?')}"
        case _:
            return ""


def timeline_plot(
    events: Sequence[Mapping[str, Any]],
    checkpoints: Sequence[Mapping[str, Any]],
    created: datetime,
    *,
    kept_times: Sequence[float] = (),
    until_s: float | None,
) -> Plot | None:
    """Returns lanes of what happened; None where nothing did.

    Args:
        events: Events of the job, in order of time.
        checkpoints: Records of saved checkpoints.
        created: Time when the job was made.
        kept_times: Times, seconds since the epoch, of the last steps that were kept; NaN where none was.
        until_s: Seconds since then at which the job ended, or up to which it is known; None where neither is known.
    """
    begin_s = created.timestamp()
    last_s = max([0.0 if until_s is None else until_s, *(event["time"] - begin_s for event in events)])
    # Where an attempt fails for good, what it saved remains.
    kept_s = [time - begin_s for time in (*kept_times, *(each["time"] for each in checkpoints))]
    lanes = [
        ("queue", list(_queue(events, begin_s, last_s))),
        ("attempts", list(_attempts(events, begin_s, last_s, kept_s))),
        ("checkpoints", [_checkpoint(each, begin_s) for each in checkpoints]),
        ("slow ranks", _moments(events, begin_s, {"straggler"}, "slow")),
        ("failures", _moments(events, begin_s, {"rank_exit", "hang", "host_lost", "kill"}, "failure")),
    ]
    keys = [
        Key("swatch filled wait", "waits"),
        Key("swatch filled good", "runs"),
        Key("swatch filled bad", "lost with a failure"),
        Key("swatch filled save", "saves"),
    ]
    sentence = (
        "Each attempt is a bar, red from the last step that was kept on. Below: what was saved, slow ranks, failures."
    )
    return lanes_plot("What happened", sentence, lanes, keys=keys)


def _queue(events: Sequence[Mapping[str, Any]], begin_s: float, last_s: float) -> Iterator[Span]:
    waiting = [event for event in events if event["event"] in ("waiting", "start")]
    for at, event in enumerate(waiting):
        if event["event"] == "waiting":
            end_s = waiting[at + 1]["time"] - begin_s if at + 1 < len(waiting) else last_s
            yield Span(event["time"] - begin_s, end_s, "wait", str(event.get("text", "waits")))


def _attempts(
    events: Sequence[Mapping[str, Any]], begin_s: float, last_s: float, kept_s: Sequence[float]
) -> Iterator[Span]:
    open_at: float | None = None
    number, why = 0, ""
    for event in events:
        at_s = event["time"] - begin_s
        match event:
            case {"event": "start"}:
                open_at, number, why = at_s, number + 1, ""
            case {"event": "rank_exit", "status": int(status)} if status:
                why = why or _text(event)
            case {"event": "hang" | "host_lost"}:
                why = why or _text(event)
            case {"event": "restart" | "end"} if open_at is not None:
                is_bad = event["event"] == "restart" or event.get("outcome") == "failed"
                text = f"attempt {number}, {format_duration(at_s - open_at)}{f': {why}' if why and is_bad else ''}"
                kept = max((each for each in kept_s if open_at < each < at_s), default=open_at) if is_bad else at_s
                if kept > open_at:
                    yield Span(open_at, kept, "good", text)
                if kept < at_s:
                    yield Span(kept, at_s, "bad", text)
                open_at = None
                if event["event"] == "restart" and event.get("wait_s"):
                    yield Span(at_s, at_s + float(event["wait_s"]), "wait", "waits before it is started again")
            case _:
                pass
    if open_at is not None:
        yield Span(open_at, max(last_s, open_at), "good", f"attempt {number}")


def _checkpoint(record: Mapping[str, Any], begin_s: float) -> Span:
    size = record.get("bytes")
    size_text = f", {format_bytes(size)}" if isinstance(size, int | float) else ""
    at_s = record["time"] - begin_s
    return Span(at_s, at_s, "save", f"checkpoint of step {record.get('step', '?')}{size_text}")


def _moments(events: Sequence[Mapping[str, Any]], begin_s: float, names: set[str], style: str) -> list[Span]:
    spans: list[Span] = []
    for event in events:
        if event["event"] in names:
            at_s = event["time"] - begin_s
            spans.append(Span(at_s, at_s, style, _text(event)))
    return spans
