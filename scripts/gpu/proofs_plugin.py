"""A plugin of pytest: writes what happens to a file as it happens, for who reads it after this process has died.

One JSON line an event, each in the file before the next thing is done: `found` (ids of what will run, with seconds),
`start`,
`phase` (outcome of setup, call or teardown), `warning`, `error` (a file that could not be collected), `lost` (the
device fails whatever is asked of it) and `end`. A lost device ends the process at once: the tests behind it would fail
for it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from .proofs import LOST

_MOST = 4000
#: What a test probably takes that has no `gpu_seconds`.
_TEST_S = 0.4


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("proofs")
    group.addoption("--proofs-log", type=Path, required=True, help="file that events are written to")
    group.addoption("--proofs-done", type=Path, required=True, help="file of the ids, a line each, that are left out")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Log(config.getoption("--proofs-log"), config.getoption("--proofs-done")))
    try:
        from hypothesis import settings
    except ImportError:
        return  # tests that use it say so themselves
    # The same examples in every run, as in CI; its profile of that name came with a later version.
    settings.register_profile("proofs", derandomize=True, deadline=None, database=None)
    settings.load_profile("proofs")


class _Log:
    """Writes events.

    Args:
        path: file of the events.
        done: file of the ids that are left out.
    """

    def __init__(self, path: Path, done: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._done = frozenset(done.read_text(encoding="utf-8").splitlines())
        self._failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(event="found", tests={item.nodeid: probable_s(item) for item in session.items})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(event="error", id=report.nodeid, message=report.longreprtext[-_MOST:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._failed = False
        self._write(event="start", id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed
        message = ""
        if report.failed:
            message = report.longreprtext
        elif report.skipped:
            reason = report.longrepr
            message = str(reason[2] if isinstance(reason, tuple) else getattr(report, "wasxfail", reason))
        self._write(
            event="phase",
            id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            seconds=report.duration,
            message=message[-_MOST:],
        )

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        category = warning_message.category.__name__
        self._write(event="warning", id=nodeid, message=f"{category}: {warning_message.message}"[:_MOST])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._failed and (reason := _why_lost()) is not None:
            self._write(event="lost", id=nodeid, message=reason)
            # Not sys.exit: destructors of what is on the device may hang.
            os._exit(LOST)

    def pytest_sessionfinish(self) -> None:
        self._write(event="end")

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def probable_s(item: pytest.Item) -> float:
    """Returns what a test says of itself, of its file or class where it says nothing."""
    mark = item.get_closest_marker("gpu_seconds")
    if mark is None:
        return _TEST_S
    (seconds,) = mark.args
    return float(seconds)


def _why_lost() -> str | None:
    """Returns what the device says to anything, None if it works or none was used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
