"""The tests marked `cuda`, run on a GPU: which files have some, and a run of some files that no test can end.

    python -m gpu.proofs --root DIR [--marker cuda] --list             ids by folder, with seconds, as JSON
    python -m gpu.proofs --root DIR [--marker cuda] --limit-s 60 FILE...   one JSON line: a row a test

A test that kills its process (an abort, a segmentation fault), or after which the device answers nothing, is one failed
row: another process goes on behind it. So is one that hangs. Plugins of the machine's own are left out. Warnings fail
no test there, where packages have other versions than in CI; they stand in its row.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

#: Exit code of a process whose device is lost: see `proofs_plugin.py`.
LOST = 71
_MARK = "mark.cuda"
#: Where a process finds the plugin.
_SCRIPTS = str(Path(__file__).parents[1])
#: When pytest-timeout ends a test, and when the process is ended in which that had no effect.
_TEST_S, _SILENCE_S = 30.0, 40.0
_POLL_S = 0.1
_NO_TIME = "no time was left"
#: What is kept of a message, and of what a dead process said last.
_MOST = 3000


@dataclass(slots=True)
class Test:
    """A test's row.

    Attributes:
        id: test id as pytest writes it.
        state: running, passed, failed, skipped, not run.
        seconds: seconds of setup, call and teardown together.
        message: end of the failure, or the reason.
        warnings: warnings that would fail the test in CI.
    """

    __test__ = False  # pytest, that is no test class

    id: str
    state: str = "not run"
    seconds: float = 0.0
    message: str = ""
    warnings: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Returns it without what is empty."""
        return {key: value for key, value in asdict(self).items() if value or key == "seconds"}


def candidates(root: Path) -> list[Path]:
    """Returns the test files in which tests may be marked: few enough to collect them all.

    A test is marked in its own file, by a name that a file beside the tests marks, or by a fixture that such a file
    marks, or one that asks for such a fixture.

    Args:
        root: folder with the tests.
    """
    shared = [path for path in sorted(root.rglob("*.py")) if not path.name.startswith("test_")]
    fixtures, values = _carriers([path.read_text(encoding="utf-8") for path in shared])
    ways = [rf"{re.escape(_MARK)}\b", *(rf"\b{name}\b" for name in sorted(values))]
    for name in sorted(fixtures):
        # An argument of a function, or a word of `usefixtures`.
        ways += [rf"def \w+\([^)]*\b{name}\b", rf"[\"']{name}[\"']"]
    asks = re.compile("|".join(ways))
    return [path for path in sorted(root.rglob("test_*.py")) if asks.search(path.read_text(encoding="utf-8"))]


def _carriers(texts: Sequence[str]) -> tuple[set[str], set[str]]:
    """Returns names of fixtures and of values that carry the mark, in files that are no test files."""
    fixtures, values = set[str](), set[str]()
    trees = [(text, ast.parse(text).body) for text in texts]
    before = -1
    while len(fixtures) != before:
        before = len(fixtures)
        for text, body in trees:
            for node in body:
                if isinstance(node, ast.FunctionDef) and _is_marked_fixture(node, text, fixtures):
                    fixtures.add(node.name)
                elif isinstance(node, ast.Assign | ast.AnnAssign) and _MARK in (
                    ast.get_source_segment(text, node) or ""
                ):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    values |= {target.id for target in targets if isinstance(target, ast.Name)}
    return fixtures, values


def _is_marked_fixture(node: ast.FunctionDef, text: str, marked: set[str]) -> bool:
    """Says whether a function is a fixture that carries the mark, or asks for one that does."""
    decorators = [ast.get_source_segment(text, one) or "" for one in node.decorator_list]
    arguments = {argument.arg for argument in node.args.args}
    is_fixture = any("fixture" in decorator for decorator in decorators)
    return is_fixture and (any(_MARK in decorator for decorator in decorators) or bool(arguments & marked))


def listed(files: Sequence[Path], *, root: Path, marker: str) -> dict[str, Any]:
    """Collects files, and returns tests by folder below `root`, and what could not be collected.

    Args:
        files: test files.
        root: folder with the tests.
        marker: expression of pytest's `-m`.

    Returns:
        `folders` (by folder, ids with the seconds that each probably takes), `errors` (messages by file), `tests`
        (their number), and `why` where it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        code, said = _collect(files, events, root=root, marker=marker)
        folders: dict[str, dict[str, float]] = {}
        errors: dict[str, str] = {}
        for event in _events(events):
            match event["event"]:
                case "found":
                    for id_, seconds in event["tests"].items():
                        folders.setdefault(folder_of(id_), {})[id_] = seconds
                case "error":
                    errors[event["id"]] = event["message"][-_MOST:]
                case _:
                    pass
    found: dict[str, Any] = {"tests": sum(map(len, folders.values())), "folders": folders, "errors": errors}
    if errors:
        found["why"] = f"could not be collected: {', '.join(errors)}"
    elif not folders:
        found["why"] = f"no test was collected (pytest: exit code {code})"
        found["said"] = said
    return found


def folder_of(test_id: str) -> str:
    """Returns a test's folder below `tests`: `runtime/memory` of `tests/runtime/memory/test_bus.py::test_x`."""
    parent = PurePosixPath(test_id.partition("::")[0]).parent
    parts = parent.parts[1:] if parent.parts[:1] == ("tests",) else parent.parts
    return "/".join(parts) or "."


def run(
    files: Sequence[Path],
    *,
    root: Path,
    marker: str,
    limit_s: float,
    silence_s: float = _SILENCE_S,
    must_end: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Runs the marked tests of some files to the last one, in as many processes as it takes.

    Args:
        files: test files.
        root: folder with the tests.
        marker: expression of pytest's `-m`.
        limit_s: seconds after which the run ends, even if tests are left.
        silence_s: seconds without any event after which a test process is ended.
        must_end: function that returns whether the run must end now and keep the rows that it has.

    Returns:
        counts by state, `tests` (their rows), `deaths` (why processes ended early), and `why` if it failed.
    """
    ends_s = time.monotonic() + limit_s

    def has_time() -> bool:
        return time.monotonic() < ends_s and not must_end()

    tests: dict[str, Test] = {}
    deaths: list[str] = []
    errors: dict[str, str] = {}
    while True:
        done = sum(test.state != "not run" for test in tests.values())
        death = _run_once(files, tests, errors, root=root, marker=marker, has_time=has_time, silence_s=silence_s)
        if death is None:
            break
        deaths.append(death)
        # A process that gets nowhere, or no time for another: nothing more is tried.
        if sum(test.state != "not run" for test in tests.values()) == done or not has_time():
            break
        if not any(test.state == "not run" for test in tests.values()):
            break
    return _report(tests, deaths, errors)


def _report(tests: dict[str, Test], deaths: list[str], errors: dict[str, str]) -> dict[str, Any]:
    states = [test.state for test in tests.values()]
    counts = {state: states.count(state) for state in ("passed", "failed", "skipped", "not run")}
    report: dict[str, Any] = {**counts, "tests": [test.row() for test in tests.values()]}
    if deaths:
        report["deaths"] = deaths
    if errors:
        report["errors"] = errors
    reasons: list[str] = []
    if errors:
        reasons.append(f"could not be collected: {', '.join(errors)}")
    if not tests:
        reasons.append("no test was collected")
    if counts["failed"]:
        reasons.append(f"{counts['failed']} failed: {', '.join(t.id for t in tests.values() if t.state == 'failed')}")
    if counts["not run"]:
        reasons.append(f"{counts['not run']} not run")
    reasons += [death for death in deaths if not counts["failed"]]
    if tests and not reasons and not counts["passed"]:
        reasons.append(f"all were skipped: {next(iter(tests.values())).message}")
    if reasons:
        report["why"] = "; ".join(reasons)
    return report


def _run_once(
    files: Sequence[Path],
    tests: dict[str, Test],
    errors: dict[str, str],
    *,
    root: Path,
    marker: str,
    has_time: Callable[[], bool],
    silence_s: float,
) -> str | None:
    """Runs what has not run yet in one process; returns why that ended early, None if it did not."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as talk:
        events, done = Path(folder) / "events", Path(folder) / "done"
        done.write_text("\n".join(test.id for test in tests.values() if test.state != "not run"), encoding="utf-8")
        events.touch()
        process = subprocess.Popen(
            _pytest(files, events, done, root=root, marker=marker),
            cwd=root.parent,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=talk,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        death = _watch(process, events, has_time=has_time, silence_s=silence_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        has_ended = False
        for event in _events(events):
            has_ended = has_ended or event["event"] == "end"
            _take(event, tests, errors)
        talk.seek(0)
        said = _last_words(talk.read())
    if death is None and (not has_ended or code not in (0, 1, 2, 5)):
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lost = "; the device answers nothing any more" if code == LOST else ""
        death = f"its process ended by {ended}{lost}"
    if death is None:
        return None
    running = [test for test in tests.values() if test.state == "running"]
    for test in running:
        # What time ran out for has not failed.
        test.state, test.message = "not run" if death == _NO_TIME else "failed", f"{death}\n{said}"
    if running:
        return f"{running[-1].id}: {death}"
    last = next((test.id for test in reversed(tests.values()) if test.state != "not run"), None)
    return f"behind {last}: {death}\n{said}" if last else f"before the first test: {death}\n{said}"


def _watch(
    process: subprocess.Popen[bytes], events: Path, *, has_time: Callable[[], bool], silence_s: float
) -> str | None:
    """Waits for a process; returns why it must be ended if it must: a test hangs, or there is no time left."""
    size, moved_s = -1, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return None
        now_s = time.monotonic()
        if (now_size := events.stat().st_size) != size:
            size, moved_s = now_size, now_s
        if not has_time():
            return _NO_TIME
        # Before the first event files are imported, which takes what it takes.
        if size > 0 and now_s - moved_s > silence_s:
            return f"nothing happened for {silence_s:.0f} s"


def _last_words(said: str) -> str:
    """Returns the end of what a process said; of a fatal error the stack from its top."""
    start = said.rfind("Fatal Python error")
    return said[-_MOST:] if start < 0 else said[start : start + _MOST]


def _take(event: dict[str, Any], tests: dict[str, Test], errors: dict[str, str]) -> None:
    """Enters one event of the plugin."""
    match event["event"]:
        case "found":
            for id_ in event["tests"]:
                tests.setdefault(id_, Test(id_))
        case "error":
            errors[event["id"]] = event["message"][-_MOST:]
        case "start":
            tests[event["id"]].state = "running"
        case "phase":
            test = tests[event["id"]]
            test.seconds = round(test.seconds + event["seconds"], 3)
            if event["outcome"] != "passed":
                test.state, test.message = event["outcome"], event["message"][-_MOST:]
            elif event["when"] == "teardown" and test.state == "running":
                test.state = "passed"
        case "warning":
            if event["id"] in tests:
                tests[event["id"]].warnings.append(event["message"][:300])
        case "lost":
            tests[event["id"]].message += f"\nthe device answers nothing any more: {event['message']}"
        case _:
            pass


def _collect(files: Sequence[Path], events: Path, *, root: Path, marker: str) -> tuple[int, str]:
    run = subprocess.run(
        (*_pytest(files, events, Path(os.devnull), root=root, marker=marker), "--collect-only"),
        cwd=root.parent,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    return run.returncode, (run.stdout + run.stderr)[-_MOST:]


def _pytest(files: Sequence[Path], events: Path, done: Path, *, root: Path, marker: str) -> tuple[str, ...]:
    """Returns pytest's command line: paths in pyproject.toml hold, its options and filters of warnings do not."""
    words = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", "-W", "default"]
    words += ["-p", "gpu.proofs_plugin", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if find_spec("pytest_timeout") is not None:
        words += ["-p", "pytest_timeout", "--timeout", str(_TEST_S), "--timeout-method", "signal"]
    # Named, for pytest looks for it no further than where all files lie.
    words += ["-c", str(root.parent / "pyproject.toml"), "-m", marker]
    words += ["--proofs-log", str(events), "--proofs-done", str(done)]
    return (*words, *map(str, files))


def _environment() -> dict[str, str]:
    """Returns this process's, without words of its own for pytest or plugins that other packages bring along."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    path = os.pathsep.join(filter(None, (kept.get("PYTHONPATH"), _SCRIPTS)))
    # What a test prints before its process dies is in the row.
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**kept, **own, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a file that a process may have been killed over."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with the tests")
    parser.add_argument("--marker", default="cuda", help="expression of pytest's -m")
    parser.add_argument("--limit-s", type=float, default=180.0)
    parser.add_argument("--list", action="store_true", help="print ids by folder, and run nothing")
    parser.add_argument("files", type=Path, nargs="*", help="test files; none: all that may have marked tests")
    args = parser.parse_args()
    root: Path = args.root.resolve()
    files = [file.resolve() for file in args.files] or candidates(root)
    if args.list:
        found = listed(files, root=root, marker=args.marker)
    else:
        asked: list[int] = []
        # The driver asks before it ends a part: the rows so far are printed all the same.
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        found = run(files, root=root, marker=args.marker, limit_s=args.limit_s, must_end=lambda: bool(asked))
    print(json.dumps(found))
    sys.exit(1 if "why" in found else 0)


if __name__ == "__main__":
    main()
