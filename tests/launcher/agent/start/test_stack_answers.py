"""A rank says where its threads are, whatever it is busy with, and lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsrun.contract.environment import STACKS_ENV, STACKS_SIGNAL
from dsrun.contract.job_paths import JobPaths, stacks_pipe
from dsrun.launcher.agent.fifo_requests import request
from dsrun.launcher.failures.hang_report import main_thread
from dsrun.launcher.isolated_command import isolated_command
from support.jobs import MOVES

#: The main thread waits in native code without the GIL.
DEEP = f"""{MOVES}
def wait_here():
    print("ready", flush=True)
    threading.Event().wait()
wait_here()
"""
COUNTS = """
import sys, threading
print(threading.active_count(), len(threading.enumerate()), flush=True)
sys.stdin.read()
"""


@contextmanager
def rank(tmp_path: Path, program: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    script = tmp_path / "train.py"
    script.write_text(program)
    stacks = JobPaths(tmp_path).stacks(0)
    command = isolated_command(sys.executable, "dsrun.launcher.agent.start.bootstrap", "script", str(script))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {STACKS_ENV: str(stacks)}
    ) as process:
        try:
            yield process, stacks
        finally:
            process.kill()


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 20
    while not holds():
        assert process.poll() is None, f"the rank ended with {process.returncode}"
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_a_rank_whose_threads_move_answers_two_hundred_times_and_lives(tmp_path: Path) -> None:
    with rank(tmp_path, DEEP) as (process, stacks):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(200):
            before = stacks.stat().st_size
            assert request(stacks_pipe(stacks))
            wait_until(lambda before=before: stacks.stat().st_size > before, process)
        wait_until(lambda: stacks.read_text().endswith("in <module>\n"), process)
    text = stacks.read_text()
    assert " in down\n" in text
    last = text[text.rindex("Current thread") :]
    assert "wait_here" in [frame.function for frame in main_thread(last)]


def test_where_no_fifo_can_be_made_the_signal_asks(tmp_path: Path) -> None:
    pipe = stacks_pipe(JobPaths(tmp_path).stacks(0))
    pipe.write_text("a plain file")
    with rank(tmp_path, 'import sys\nprint("ready", flush=True)\nsys.stdin.read()\n') as (process, stacks):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert not request(pipe)
        process.send_signal(STACKS_SIGNAL)
        wait_until(lambda: stacks.read_text().endswith("in <module>\n"), process)
        assert str(tmp_path / "train.py") in [frame.file for frame in main_thread(stacks.read_text())]
    assert pipe.read_text() == "a plain file"


def test_a_program_does_not_see_the_thread_that_answers(tmp_path: Path) -> None:
    with rank(tmp_path, COUNTS) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == "1 1\n"


@pytest.mark.parametrize("reader", [True, False])
def test_a_request_waits_for_nobody(tmp_path: Path, reader: bool) -> None:
    pipe = tmp_path / "rank0.stacks.pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if reader else None
    assert request(pipe) is reader
    if descriptor is not None:
        os.close(descriptor)
    assert not request(tmp_path / "none")


def test_the_signal_is_one_that_programs_do_not_use() -> None:
    assert signal.SIGRTMIN < STACKS_SIGNAL < signal.SIGRTMAX
