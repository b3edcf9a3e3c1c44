from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import wait_for_end

HEAD = """
import json, os, signal, sys, time
from dsrun.errors import DsrunError, LaunchError, UsageError
from dsrun.launcher.jobs.detach import run_in_background
"""

DEADLINE_S = 30.0


def run(folder: Path, body: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Runs a script to the end of its streams: of everybody who has them."""
    return subprocess.run(
        [sys.executable, "-c", HEAD + body, str(folder)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        **kwargs,  # type: ignore[call-overload]
    )


STAYS = """
def work(ready):
    with open("about", "w") as file:
        json.dump({
            "pid": os.getpid(), "sid": os.getsid(0), "cwd": os.getcwd(),
            "hangup": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
            "files": [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)],
            "open": len(os.listdir("/proc/self/fd")),
        }, file)
    ready()
    print("to stdout"); print("to stderr", file=sys.stderr)
    time.sleep(600)

print("before")
run_in_background(work, log="log")
print("after")
"""


def test_the_background_has_a_session_and_streams_of_its_own(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    # It returns although the background lives: nobody there holds the streams, nor what was inherited beside them.
    ended = run(tmp_path, STAYS, pass_fds=(writer,))
    os.close(writer)
    about = json.loads((tmp_path / "about").read_text())
    try:
        assert os.read(reader, 1) == b""
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "before\nafter\n", "")
        assert about["sid"] == about["pid"]
        assert about["cwd"] == str(tmp_path)
        assert about["hangup"]
        assert about["files"] == [os.devnull, os.devnull, str(tmp_path / "log")]
        # 0, 1, 2, the answer, the file that says so and the listing itself.
        assert about["open"] == 6
        assert not wait_for_end(about["pid"], timeout_s=0)
    finally:
        os.close(reader)
        os.kill(about["pid"], signal.SIGKILL)
    assert (tmp_path / "log").read_text() == "to stderr\n"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("raise UsageError('bad word', hint='another')", "UsageError 2 error: bad word|hint: another"),
        ("raise LaunchError('no host')", "LaunchError 1 error: no host"),
        ("{}['key']", "LaunchError 1 error: the background process failed: KeyError: 'key'"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "LaunchError 1 error: the background process was ended before it had taken over",
        ),
    ],
)
def test_what_goes_wrong_before_it_is_ready_is_raised_where_the_person_is(
    tmp_path: Path, action: str, told: str
) -> None:
    body = f"""
def work(ready):
    {action}
try:
    run_in_background(work, log="log")
except DsrunError as error:
    print(type(error).__name__, error.exit_code, error.render().replace("\\n", "|"))
"""
    ended = run(tmp_path, body)
    assert (ended.stdout.strip(), ended.stderr) == (told, "")


def test_what_goes_wrong_later_stands_in_the_log(tmp_path: Path) -> None:
    body = """
def work(ready):
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    ready()
    raise ValueError("too late")
run_in_background(work, log="log")
"""
    ended = run(tmp_path, body)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert wait_for_end(int((tmp_path / "pid").read_text()), timeout_s=DEADLINE_S)
    assert (tmp_path / "log").read_text().endswith("ValueError: too late\n")


def test_one_that_nobody_waits_for_any_more_does_not_go_on(tmp_path: Path) -> None:
    # The person pressed Ctrl-C: nobody would know of what goes on.
    body = """
def work(ready):
    while os.getppid() == parent:
        time.sleep(0.01)
    with open("answer", "w") as answer:
        try:
            ready()
        except BrokenPipeError:
            answer.write("refused")
            raise
        answer.write("went on")
parent = os.getpid()
signal.setitimer(signal.ITIMER_REAL, 0.2)
run_in_background(work, log="log")
"""
    os.mkfifo(tmp_path / "answer")
    assert run(tmp_path, body).returncode == -signal.SIGALRM
    assert (tmp_path / "answer").read_text() == "refused"


def test_a_refusal_of_hosts_keeps_its_exit_code(tmp_path: Path) -> None:
    body = """
from dsrun.errors import PreflightError
def work(ready):
    raise PreflightError("host n2: no answer", hint="is it up?")
try:
    run_in_background(work, log="log")
except DsrunError as error:
    print(type(error).__name__, error.exit_code, error.render())
"""
    assert run(tmp_path, body).stdout == "PreflightError 75 error: host n2: no answer\nhint: is it up?\n"


def test_who_is_interrupted_before_the_answer_ends_the_background(tmp_path: Path) -> None:
    body = """
def work(ready):
    with open("pid", "w") as pipe:
        pipe.write(str(os.getpid()))
    time.sleep(600)
run_in_background(work, log="log")
"""
    os.mkfifo(tmp_path / "pid")
    words = [sys.executable, "-c", HEAD + body]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as process:
        background = int((tmp_path / "pid").read_text())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert b"KeyboardInterrupt" in err
    assert wait_for_end(background, timeout_s=DEADLINE_S)
