"""Failures of tests that depend on the machine's speed, kept apart from all others.

A test marked `depends_on_speed(reason)` asserts on seconds, or waits so short that a machine that does much else can
fail it. Where such a test failed, scripts/test runs it again, alone: what was lost for want of time passes then. Every
other failure stays. tests/conftest.py registers what is here; no test imports it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .marks import reason_of

MARKER = "depends_on_speed"
OPTION = "--failed-for-speed"
#: More failures than this are no chance, and run no second time: each takes minutes at the most, one after the other.
MOST = 12
#: Below pytest's cache; scripts/test looks whether it is there.
_FOLDER, _FILE = "speed", "failures.json"


def add_option(parser: pytest.Parser) -> None:
    """Adds the option by which the second run of scripts/test takes what the first one left."""
    parser.addoption(
        OPTION,
        action="store_true",
        help="run only the tests that depend on the machine's speed and failed in the last run; other failures of that "
        "run fail this one",
    )


def register(config: pytest.Config) -> None:
    """Watches the reports of all tests; in the process that has them, be there workers or not."""
    cache = getattr(config, "cache", None)
    if hasattr(config, "workerinput") or cache is None:
        return
    plugin = _SecondRun if config.getoption(OPTION) else _FirstRun
    config.pluginmanager.register(plugin(cache))


def _file(cache: pytest.Cache) -> Path:
    # Anew each time: `--cache-clear` takes the folder away after plugins are registered.
    return Path(cache.mkdir(_FOLDER)) / _FILE


def note_reasons(items: list[pytest.Item]) -> None:
    """Has the reports of marked tests carry the reason, also from a worker.

    Raises:
        pytest.UsageError: a marker without a reason.
    """
    for item in items:
        reason = reason_of(item, MARKER, example="a bound of 5 s")
        if reason is not None:
            item.user_properties.append((MARKER, reason))


class _FirstRun:
    """Writes down what failed, with the reason where it depends on the machine's speed.

    Args:
        cache: pytest cache in which a file is left for the second run, where such a run may change anything.
    """

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache = cache
        self._reasons: dict[str, str] = {}
        self._others: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reason = dict(report.user_properties).get(MARKER)
        if not report.failed:
            return
        # A worker that dies reports for its test, without the reason: that stays.
        if reason is None:
            self._others.append(report.nodeid)
        else:
            self._reasons[report.nodeid] = str(reason)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._others.append(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        file = _file(self._cache)
        file.unlink(missing_ok=True)
        if 0 < len(self._reasons) <= MOST and exitstatus == pytest.ExitCode.TESTS_FAILED:
            file.write_text(json.dumps({"reasons": self._reasons, "others": self._others}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._reasons:
            terminalreporter.section("failed, and depend on the machine's speed")
            for nodeid, reason in self._reasons.items():
                terminalreporter.line(f"{nodeid}: {reason}")


class _SecondRun:
    """Runs what the first run wrote down; fails where that had other failures, or where one of these does not pass.

    Args:
        cache: pytest cache with the file that the first run left.
    """

    def __init__(self, cache: pytest.Cache) -> None:
        file = _file(cache)
        told = json.loads(file.read_text()) if file.exists() else {"reasons": {}, "others": []}
        self._wanted: set[str] = set(told["reasons"])
        self._others: list[str] = told["others"]
        self._passed: set[str] = set()

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        files = {config.rootpath / nodeid.partition("::")[0] for nodeid in self._wanted}
        return True if collection_path.is_file() and collection_path not in files else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if item.nodeid not in self._wanted]
        items[:] = [item for item in items if item.nodeid in self._wanted]
        config.hook.pytest_deselected(items=left)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        passes = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if exitstatus in passes and (self._others or self._wanted - self._passed):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("ran again, for they depend on the machine's speed")
        for nodeid in sorted(self._wanted):
            terminalreporter.line(f"{nodeid}: {'passed alone' if nodeid in self._passed else 'did not pass'}")
        if self._others:
            terminalreporter.section("failed before, and stay so")
            for nodeid in self._others:
                terminalreporter.line(nodeid)
