"""Tests pass where their own process was told to ignore signals: under `nohup`, and behind `( ... & )`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
#: Has a command ignore them, as a shell does for `nohup` and `&`.
IGNORING = ["sh", "-c", "trap '' HUP INT QUIT && exec \"$@\"", "sh"]


def ignored_by_programs() -> set[int]:
    """Returns which of the signals a program ignores that this process starts."""
    shown = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    mask = next(int(line.split()[1], 16) for line in shown.splitlines() if line.startswith("SigIgn:"))
    return {signum for signum in SIGNALS if mask >> (signum - 1) & 1}


def test_programs_that_tests_start_begin_with_the_default_signals() -> None:
    assert ignored_by_programs() == set()
    for signum in SIGNALS:
        if signal.getsignal(signum) not in (signal.SIG_DFL, signal.default_int_handler):
            signal.raise_signal(signum)  # under nohup this process goes on


def test_that_holds_where_the_tests_ignore_them() -> None:
    name = f"{__file__}::{test_programs_that_tests_start_begin_with_the_default_signals.__name__}"
    command = [*IGNORING, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout
