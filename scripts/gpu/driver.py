"""Runs parts one after the other, each a process with a time limit, and writes one JSON file after each.

What the parts are is an argument: nothing here knows of GPUs. A part that fails, hangs, prints nothing or dies is a row
with the reason, and the others run all the same. The driver imports neither torch nor anything that opens the device.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TypeAlias

#: A part's row: `state` (ok, failed, not run), and `seconds`, `result`, `why` and `said` where there are any.
Row: TypeAlias = dict[str, Any]
_GRACE_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the check.

    Attributes:
        name: name of the part's row in the results.
        argv: its command line; the last JSON line of its stdout is its result, also if it fails later.
        limit_s: seconds after which the part is ended.
        estimate_s: seconds that the part probably takes; with less time left it is not started.
        needs: a package without which there is nothing to run.
        is_ours: its failure is the check's; a peer that does not run on a machine is a result.
        is_extra: whether the part runs only if it is asked for by name.
        again: name of an earlier part that it repeats; what failed then is not tried again.
    """

    name: str
    argv: tuple[str, ...]
    limit_s: float
    estimate_s: float
    needs: str | None = None
    is_ours: bool = True
    is_extra: bool = False
    again: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row that is found by looking at others': no process, no time.

    Attributes:
        name: name of the comparison's row in the results.
        row: function that makes the row from all rows so far.
        is_extra: whether the row is made only if it is asked for by name.
        estimate_s: seconds that it probably took, before the first part, to find the data that is compared.
    """

    name: str
    row: Callable[[Mapping[str, Row]], Row]
    is_extra: bool = False
    estimate_s: float = 0.0


def chosen(parts: Sequence[Part | Comparison], only: Sequence[str]) -> list[Part | Comparison]:
    """Returns the parts whose names begin with one of `only`; with none, all that are not extra."""
    if only:
        return [part for part in parts if part.name.startswith(tuple(only))]
    return [part for part in parts if not part.is_extra]


def estimate_s(parts: Sequence[Part | Comparison]) -> float:
    """Returns what the parts probably take together."""
    return sum(part.estimate_s for part in parts)


def run_all(
    parts: Sequence[Part | Comparison],
    *,
    out: Path,
    minutes: float,
    report: dict[str, Any],
    derived: Callable[[Mapping[str, Row]], Mapping[str, Any]] = lambda _: {},
    refusal: str | None = None,
) -> bool:
    """Runs the parts in order, says each row on stderr, and a summary behind the last.

    Args:
        parts: parts and comparisons to run, in order.
        out: file of the results, written after each part: what was measured stays if the machine is taken away.
        minutes: minutes that all parts together may take.
        report: content of the results file so far; the key `parts` is added to it.
        derived: tables beside the rows, made from them.
        refusal: reason that nothing can run here, with which the first part fails; None if the parts can run.

    Returns:
        whether none of ours failed.
    """
    deadline_s = time.monotonic() + 60 * minutes
    rows: dict[str, Row] = report.setdefault("parts", {})
    for index, part in enumerate(parts):
        if refusal is not None:
            reason = f"nothing can run here: see {parts[0].name}"
            rows[part.name] = {"state": "not run", "why": reason} if index else {"state": "failed", "why": refusal}
        elif isinstance(part, Comparison):
            rows[part.name] = part.row(rows)
        elif part.again is not None and rows.get(part.again, {}).get("state") == "failed":
            rows[part.name] = {"state": "not run", "why": f"{part.again} failed"}
        else:
            rows[part.name] = run_part(part, patience_s=deadline_s - time.monotonic())
        report |= derived(rows)
        _say(_line(part.name, rows[part.name]))
        _write(out, report)
    ours = [part.name for part in parts if isinstance(part, Comparison) or part.is_ours]
    _say(summary(rows, ours))
    return not any(rows[name]["state"] == "failed" for name in ours)


def run_part(part: Part, *, patience_s: float, grace_s: float = _GRACE_S) -> Row:
    """Runs one part to its end or its time limit.

    Args:
        part: part to run.
        patience_s: seconds that are left of the time of the whole check.
        grace_s: seconds that a part and the processes it leaves behind have to end before they are killed.
    """
    if part.needs is not None and find_spec(part.needs) is None:
        return {"state": "not run", "why": f"{part.needs} is not installed"}
    if patience_s < part.estimate_s:
        return {
            "state": "not run",
            "why": f"no time was left: {max(0, patience_s):.0f} s, and it takes about {part.estimate_s:.0f} s",
        }
    started_s = time.monotonic()
    limit_s = min(part.limit_s, patience_s)
    # Files, not pipes: a part that is ended may leave children that hold a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as talk:
        try:
            process = subprocess.Popen(
                part.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=talk, start_new_session=True
            )
        except OSError as error:
            return {"state": "failed", "why": f"could not be started: {error}"}
        try:
            process.wait(limit_s)
            reason = _why_of(process.returncode)
        except subprocess.TimeoutExpired:
            reason = f"not done after {limit_s:.0f} s"
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        finally:
            left = _end_group(process, grace_s)
        row: Row = {"state": "ok", "seconds": round(time.monotonic() - started_s, 1)}
        result = _result_in(_text_of(out))
        if result is not None:
            row["result"] = result
        if reason is None and result is None:
            reason = "it ended well, but printed no result"
        if left:
            row["left"] = "processes, which were ended"
        if reason is not None:
            said = _text_of(talk)[-4000:] or _text_of(out)[-4000:]
            row |= {"state": "failed", "why": (result or {}).get("why", reason), "said": said}
        return row


def summary(rows: Mapping[str, Row], ours: Sequence[str]) -> str:
    """Returns one line: how many parts passed, failed and were skipped; peers that failed are counted apart."""
    states = [row["state"] for row in rows.values()]
    failed = sum(rows[name]["state"] == "failed" for name in ours)
    peers = states.count("failed") - failed
    line = f"{states.count('ok')} passed, {failed} failed, {states.count('not run')} skipped"
    return f"{line}, {peers} of peers failed" if peers else line


def _why_of(code: int) -> str | None:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else None


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> bool:
    """Ends what is left of a part, and the part; returns whether there was something beside it.

    What a good end leaves for a moment (a resource tracker, say) has time to go by itself.
    """
    if process.returncode is not None:
        deadline_s = time.monotonic() + grace_s
        while _group_lives(process.pid):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        else:
            return False
    left = process.returncode is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return left


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _result_in(text: str) -> dict[str, Any] | None:
    """Returns what a part printed: one JSON document, or lines of which the last JSON object counts, tagged or not."""
    text = text.strip()
    with contextlib.suppress(ValueError):
        whole = json.loads(text)
        return whole if isinstance(whole, dict) else None
    for line in reversed(text.splitlines()):
        start = line.find("{")
        with contextlib.suppress(ValueError):
            if start >= 0 and isinstance(found := json.loads(line[start:]), dict):
                return found
    return None


def _text_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _line(name: str, row: Row) -> str:
    said = row.get("said", "").strip().splitlines()
    reason = f": {row['why']}" if "why" in row else ""
    seconds = f" ({row['seconds']:.0f} s)" if "seconds" in row else ""
    return f"{name}: {row['state']}{seconds}{reason}" + "".join(f"\n    {line}" for line in said[-12:])


def _write(out: Path, report: Mapping[str, Any]) -> None:
    """Writes the whole file or none of it: the run may be cut off at any moment."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".new")
    beside.write_text(json.dumps(report, indent=1) + "\n")
    beside.replace(out)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
