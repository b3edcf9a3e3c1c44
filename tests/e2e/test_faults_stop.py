"""Fault matrix, part A: how a job is stopped by signals, keys and closed terminals. See test_faults_process.py."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, PASS_GATE, READY, WAIT, Bound, Gate, launched
from support.streams import Terminal

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

GRACE_S = 1.0
#: Beyond the grace, in which ranks may save.
STOP = Bound(5, 20)
#: The second Ctrl-C: no grace.
KILL = Bound(2, 20)
TWO_RANKS = ("-n", "2", "--start", "exec")

#: Counts a signal, saves what it counted as a checkpoint would be saved, and goes on until it has heard nothing more
#: for a while (rank 0), or for ever (rank 1, which does not listen).
SAVES = f"""
import os, signal, sys, threading
folder, name = sys.argv[1:]
heard = []
quiet = threading.Event()
signal.signal(getattr(signal, name), lambda *_: (heard.append(name), quiet.set()))
{READY}
quiet.wait()
if os.environ["RANK"] == "1":
    threading.Event().wait()
# A second one would come at once, as both come from the same request.
signal.sigtimedwait([signal.SIGRTMIN], 0.3)
with open(folder + "/saved.new", "w") as file:
    file.write(" ".join(heard))
os.rename(folder + "/saved.new", folder + "/saved")
"""


@pytest.mark.depends_on_speed("the bound STOP")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_A6_a_stop_is_forwarded_once_ranks_may_save_and_deaf_ones_are_killed_at_the_end_of_the_grace(
    tmp_path: Path, name: str, code: int
) -> None:
    # SIGHUP behaves as SIGTERM does: first half of A8.
    words = [str(tmp_path), name]
    with launched(tmp_path, SAVES, *TWO_RANKS, words=words, grace_s=GRACE_S) as job:
        job.wait_ready(2)
        asked_s = time.monotonic()
        with STOP.on("stopping"):
            job.process.send_signal(signal.Signals[name])
            ended = job.end()
        took_s = time.monotonic() - asked_s
    assert (tmp_path / "saved").read_text() == name
    assert ended.exit_code == code
    assert ended.errors == []
    assert took_s >= GRACE_S


@pytest.mark.depends_on_speed("the bound STOP")
def test_A8_a_closed_terminal_stops_the_job_as_sigterm_does(tmp_path: Path) -> None:
    terminal = Terminal()
    words = [str(tmp_path), "SIGHUP"]
    with launched(tmp_path, SAVES, *TWO_RANKS, words=words, terminal=terminal, grace_s=GRACE_S) as job:
        job.wait_ready(2)
        with STOP.on("stopping"):
            terminal.close()
            ended = job.end()
    assert ended.exit_code == 129
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_A8_under_nohup_a_job_survives_its_terminal(tmp_path: Path, gate: Gate) -> None:
    terminal = Terminal(has_shell=True)
    program = f"{READY}{PASS_GATE}print('went on')\n"
    with launched(
        tmp_path,
        program,
        *TWO_RANKS,
        words=[gate.path],
        prefix=["nohup"],
        terminal=terminal,
        redirected=True,
        grace_s=GRACE_S,
    ) as job:
        job.wait_ready(2)
        terminal.close()
        gate.let_through(2)
        ended = job.end()
    assert ended.exit_code == 0
    assert "went on" in ended.text


#: Does not listen to Ctrl-C.
DEAF = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{READY}{WAIT}"


@pytest.mark.depends_on_speed("the bound STOP")
def test_A9_ctrl_c_once_lets_ranks_save_and_shows_no_traceback_of_dsrun(tmp_path: Path) -> None:
    terminal = Terminal()
    words = [str(tmp_path), "SIGINT"]
    with launched(tmp_path, SAVES, *TWO_RANKS, words=words, terminal=terminal, grace_s=GRACE_S) as job:
        job.wait_ready(2)
        with STOP.on("stopping"):
            terminal.press(b"\x03")
            ended = job.end()
    assert ended.exit_code == 130
    assert (tmp_path / "saved").read_text() == "SIGINT"


@pytest.mark.depends_on_speed("the bound KILL")
def test_A9_ctrl_c_twice_kills_at_once(tmp_path: Path) -> None:
    terminal = Terminal()
    with launched(tmp_path, DEAF, *TWO_RANKS, terminal=terminal, grace_s=600) as job:
        job.wait_ready(2)
        terminal.press(b"\x03")
        job.wait_for("SIGINT: stopping", "stdout")
        with KILL.on("killing"):
            terminal.press(b"\x03")
            ended = job.end()
            job.gone()
    assert ended.exit_code == 130


@pytest.mark.depends_on_speed("the bound STOP")
def test_A10_a_rank_that_ignores_sigterm_is_killed_at_the_end_of_the_grace(tmp_path: Path, gate: Gate) -> None:
    ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    program = f"{ignore}{READY}{PASS_GATE}if os.environ['RANK'] == '1': sys.exit(3)\n{WAIT}"
    with launched(tmp_path, program, "-n", "4", "--start", "exec", words=[gate.path], grace_s=GRACE_S) as job:
        job.wait_ready(4)
        died_s = time.monotonic()
        with STOP.on("stopping"):
            gate.let_through(4)
            ended = job.end()
        took_s = time.monotonic() - died_s
    assert ended.exit_code == 3
    # One grace for all of them together.
    assert took_s >= GRACE_S
    assert ended.errors[0].endswith("exited with code 3")
