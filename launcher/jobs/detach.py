"""Going on in the background: a process of its own session, and a hand-over that nobody can lose. Knows no jobs.

The one that stays waits until the one that goes says that it is ready. What goes wrong before that is raised where the
person is; what goes wrong after it is the background's own to write down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from dsrun.errors import DsrunError, LaunchError, PreflightError, Problem, UsageError

_READY = b"ready"
#: Device files that the driver's library keeps open and uses again.
_DRIVER_FILES = "/dev/nvidia"


def run_in_background(work: Callable[[Callable[[], None]], object], *, log: str) -> None:
    """Goes on with `work` in a new session, and returns here once that says it is ready.

    The background process keeps the working folder, the environment and nothing else: no terminal, no stream, no
    descriptor this process inherited. A hangup does not end it. No other thread may run in this process.

    Args:
        work: function that runs in the background and calls the function it gets once it is ready. An error before that
            is raised here; a later one is written to `log`.
        log: file for what the background writes to stderr; made if it is missing.

    Raises:
        DsrunError: what `work` raised before it was ready, or it ended before that.
        OSError: no process can be made.
    """
    read_end, write_end = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        # Or what waits in the buffers is written twice.
        stream.flush()
    background = os.fork()
    if background == 0:
        os.close(read_end)
        _go_on(work, log=log, answer_to=write_end)
    os.close(write_end)
    with open(read_end, "rb") as answers:
        try:
            answer = answers.read()
        except BaseException:
            # Ctrl-C, before anybody was told of a job: nobody would look for it.
            os.kill(background, signal.SIGTERM)
            raise
    if answer != _READY:
        raise _error_in(answer)


def _go_on(work: Callable[[Callable[[], None]], object], *, log: str, answer_to: int) -> NoReturn:
    """Is the background process. Ends without the exit handlers of the one it was forked from."""
    is_ready = False

    def ready() -> None:
        nonlocal is_ready
        os.write(answer_to, _READY)
        os.close(answer_to)
        is_ready = True

    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _leave_streams(log, keep=answer_to)
        work(ready)
    except BaseException as error:
        with suppress(OSError):
            # Nobody waits for the answer any more, or the log's disk is full: either way this is the end.
            if is_ready:
                traceback.print_exc()
                sys.stderr.flush()
            else:
                os.write(answer_to, _words_of(error))
    finally:
        os._exit(0)


def _leave_streams(log: str, *, keep: int) -> None:
    """Gives back what came from the terminal or from whoever started this, who may wait for its end."""
    null = os.open(os.devnull, os.O_RDWR)
    err = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for source, descriptor in ((null, 0), (null, 1), (err, 2)):
        os.dup2(source, descriptor)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor in (0, 1, 2, keep):
            continue
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith(_DRIVER_FILES):
                os.close(descriptor)
        except OSError:
            # The listing's own descriptor, closed by now.
            continue


def _words_of(error: BaseException) -> bytes:
    if isinstance(error, DsrunError):
        problems = error.problems
        code = error.exit_code
    else:
        problems = (Problem(f"the background process failed: {type(error).__name__}: {error}"),)
        code = LaunchError.exit_code
    body = {"exit_code": code, "problems": [[problem.message, problem.hint] for problem in problems]}
    return json.dumps(body).encode()


def _error_in(answer: bytes) -> DsrunError:
    if not answer:
        return LaunchError("the background process was ended before it had taken over")
    body: Any = json.loads(answer)
    problems = [Problem(message, hint) for message, hint in body["problems"]]
    kinds: dict[int, type[DsrunError]] = {kind.exit_code: kind for kind in (UsageError, PreflightError)}
    return kinds.get(body["exit_code"], LaunchError).of(problems)
