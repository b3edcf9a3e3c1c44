"""Runs a telling part of the tests with each supported version of Python and torch, and prints a table.

    bash scripts/versions                               # all, one after the other: about four minutes each
    bash scripts/versions --list                        # what would run, and which interpreters are missing
    bash scripts/versions --only 3.10:2.10,3.13:2.15    # these; any pair of Python and torch may be named
    bash scripts/versions --torch-build cpu             # builds of download.pytorch.org/whl/cpu; without it, PyPI's
    bash scripts/versions --python 3.12=/opt/python3.12/bin/python3
    bash scripts/versions --last --markdown             # what the last runs found, as docs/reference/versions.md has it
    bash scripts/versions --only 3.13:2.15 -- tests/runtime/zero    # these tests instead

Each pair has a virtual environment under `--folder`, with dsrun (editable) and its extra `test`; it is made once. An
interpreter is looked for in `--python`, on PATH and in pyenv; a pair without one is skipped by name. Exits with 1 if a
test failed, an environment could not be made, or nothing ran. Needs the standard library of Python 3.10 alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
#: Each supported Python and torch at least once; the oldest with the oldest, the newest with the newest.
PAIRS = ("3.10:2.10", "3.11:2.11", "3.12:2.12", "3.11:2.13", "3.11:2.14", "3.13:2.15")
#: Where versions have differed: what starts and ends ranks, private names of torch, its warnings.
TESTS = (
    "tests/test_layout.py",
    *(f"tests/launcher/agent/start/test_{name}.py" for name in ("bootstrap", "spawner", "gloo_exit", "worker")),
    "tests/launcher/agent/watch/test_unfinished_failures.py",
    "tests/launcher/failures/causes/test_recognise.py",
    "tests/launcher/test_cli.py",
    "tests/launcher/machine/software/test_loaded_libraries.py",
    "tests/e2e/test_example.py",
    "tests/runtime/mesh/join/test_groups.py",
    "tests/runtime/mesh/test_c10d.py",
    "tests/runtime/mesh/host_memory/test_collectives.py",
    "tests/runtime/zero/params/test_store.py",
    "tests/runtime/zero/test_compile.py",
    "tests/runtime/zero/hooks/test_modules.py",
    "tests/runtime/checkpoint/format/test_load.py",
    "tests/runtime/checkpoint/convert/test_dcp.py",
    "tests/runtime/test_late_compiler.py",
    "tests/runtime/test_own_hooks.py",
    "tests/runtime/precision/test_autocast.py",
    "tests/runtime/activation/test_activate.py",
)
_QUESTION = "import ensurepip, platform, venv; print(platform.python_version())"
_ANSWER = "import platform, torch; print(platform.python_version(), torch.__version__)"
_COLUMNS = ("Python", "torch", "passed", "failed", "skipped", "seconds", "date")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one pair gave.

    Attributes:
        python: version; as the pair names it where nothing ran.
        torch: version of torch with its build; the version of the pair where nothing ran.
        passed: tests that passed.
        failed: tests that failed, or whose set-up did.
        skipped: tests that were skipped.
        seconds: duration of the tests.
        date: day of the run.
        failures: names of the tests that failed.
        reason: reason that nothing ran or that the run was cut short; None if it went through.
        absent: nothing ran for want of an interpreter.
    """

    python: str
    torch: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    date: str = ""
    failures: tuple[str, ...] = ()
    reason: str | None = None
    absent: bool = False

    @property
    def is_bad(self) -> bool:
        return self.failed > 0 or (self.reason is not None and not self.absent)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bash scripts/versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PAIRS), help="pairs PYTHON:TORCH, with commas")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where the environments are")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH", help="an interpreter")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--torch-build", metavar="BUILD", help="torch's build, such as cpu or cu130")
    source.add_argument("--index-url", help="index to take torch from")
    parser.add_argument("--minutes", type=float, default=15.0, help="longest run of one environment's tests")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--last", action="store_true", help="show what the last runs found, and run nothing")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="rows as JSON")
    form.add_argument("--markdown", action="store_true", help="rows as a table of Markdown")
    parser.add_argument("tests", nargs="*", help="arguments of pytest instead of the usual tests")
    args = parser.parse_args()
    pairs = [tuple(pair.split(":")) for pair in args.only.split(",")]
    given = dict(one.partition("=")[::2] for one in args.python)
    if bad := [pair for pair in pairs if len(pair) != 2 or not all(part.count(".") == 1 for part in pair)]:
        parser.error(f"--only: {':'.join(bad[0])} is no pair such as 3.10:2.10")
    index = f"https://download.pytorch.org/whl/{args.torch_build}" if args.torch_build else args.index_url
    # An exception ends the tests too, which are in a session of their own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    rows: list[Row] = []
    for python, torch in pairs:
        folder = args.folder.resolve() / "-".join(filter(None, (python, torch, args.torch_build)))
        if args.last:
            rows += [Row(**json.loads(one.read_text())) for one in folder.glob("result.json")]
            continue
        interpreter = find_python(python, given=given, environ=os.environ)
        if interpreter is None:
            hint = f"`pyenv install {python}`, apt's python{python}-venv, or --python {python}=PATH"
            rows.append(Row(python=python, torch=torch, reason=f"skipped: no Python {python}: {hint}", absent=True))
        elif args.list:
            print(f"Python {python}, torch {torch}: {interpreter}, in {folder}")
        else:
            rows.append(_run(folder, interpreter, python, torch, index, args.tests or TESTS, 60 * args.minutes))
            if not args.tests:
                (folder / "result.json").write_text(json.dumps(asdict(rows[-1])))
    if args.list:
        print("".join(f"Python {row.python}, torch {row.torch}: {row.reason}\n" for row in rows), end="")
        return
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else table(rows, markdown=args.markdown))
    if all(row.absent for row in rows):
        _say("error: nothing ran\nhint: --list says which interpreters are missing")
    sys.exit(any(row.is_bad for row in rows) or all(row.absent for row in rows))


def find_python(version: str, *, given: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Returns an interpreter of a version that can make virtual environments; None if there is none.

    Args:
        version: such as `3.12`.
        given: paths that the user named, by version; then nothing else will do.
        environ: environment variables, with PATH, HOME and PYENV_ROOT.
    """
    pyenv = Path(environ.get("PYENV_ROOT") or Path(environ.get("HOME", "/")) / ".pyenv") / "versions"
    releases = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: (len(path.parts[-3]), path), reverse=True)
    on_path = shutil.which(f"python{version}", path=environ.get("PATH", ""))
    candidates = [given[version]] if version in given else [on_path, *map(str, releases)]
    for path in filter(None, candidates):
        # What is there may be pyenv's stand-in for a version that is not installed, or lack `venv`.
        if (_answer(path, _QUESTION) or "").startswith(f"{version}."):
            return path
    return None


def results(report: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Returns the counts of a JUnit file, `passed`, `failed` and `skipped`, and the names of tests that failed."""
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, list[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        if kind == "failed":
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, tuple(failures)


def table(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Returns rows as text, what failed and what was skipped below; as Markdown, the tests that ran too."""
    cells = [_COLUMNS, *(_cells(row) for row in rows if row.seconds or not row.absent)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in cells]
        lines.insert(1, "|---" * len(_COLUMNS) + "|")
        lines += ["", f"The tests: {', '.join(f'`{test}`' for test in TESTS)}."]
    for row in rows:
        lines += [f"Python {row.python}, torch {row.torch}: {row.reason}"] if row.reason else []
        lines += [f"Python {row.python}, torch {row.torch}: failed: {name}" for name in row.failures]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    counts = (str(count) for count in (row.passed, row.failed, row.skipped))
    return (row.python, row.torch, *counts, f"{row.seconds:.0f}", row.date)


def _run(
    folder: Path, interpreter: str, python: str, torch: str, index: str | None, tests: Sequence[str], patience_s: float
) -> Row:
    """Makes an environment where it is not there yet, and runs the tests in it."""
    today = date.today().isoformat()
    executable = str(folder / "bin" / "python")
    _say(f"Python {python}, torch {torch}: the environment, in {folder}")
    stamp, wanted = folder / "installed", f"{ROOT}\n{index}\n{(ROOT / 'pyproject.toml').read_text()}"
    if not stamp.is_file() or stamp.read_text() != wanted:
        pip = [executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [interpreter, "-m", "venv", str(folder)],
            [*pip, f"torch=={torch}.*", *(("--index-url", index) if index else ())],
            [*pip, "--editable", f"{ROOT}[test]"],
        ):
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                folder.mkdir(parents=True, exist_ok=True)
                return Row(python=python, torch=torch, date=today, reason=f"{' '.join(command)}: failed")
        stamp.write_text(wanted)
    versions = (_answer(executable, _ANSWER) or f"{python} {torch}").split()  # a torch that fails, its tests show
    _say(f"Python {versions[0]}, torch {versions[1]}: the tests")
    with tempfile.TemporaryDirectory(prefix="versions-") as place:
        report = Path(place) / "report.xml"
        state = {"XDG_STATE_HOME": f"{place}/state", "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
        command = [executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        code = _within(command, {**os.environ, **state}, patience_s)
        if code is None or not report.is_file():
            reason = "the tests took too long" if code is None else f"pytest ended with {code}"
            return Row(python=versions[0], torch=versions[1], date=today, reason=reason)
        counts, failures = results(report)
        seconds = float(next(ElementTree.parse(report).iter("testsuite")).get("time", "0"))
    # 1 is of tests that failed; what else ended the run may leave a report without a failure.
    reason = None if code in (0, 1) else f"pytest ended with {code}"
    facts: dict[str, Any] = {"python": versions[0], "torch": versions[1], "seconds": seconds, "date": today}
    facts.update(counts)
    return Row(**facts, failures=failures, reason=reason)


def _within(command: Sequence[str], environ: Mapping[str, str], patience_s: float) -> int | None:
    """Runs a command in a session of its own; returns its exit code, None if it had to be ended."""
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=sys.stderr, start_new_session=True)
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answer(python: str, question: str) -> str | None:
    try:
        done = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=120, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
