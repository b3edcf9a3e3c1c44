"""Answers the front end's questions about this host: one JSON object a line on stdin, one on stdout, until stdin ends.

Started over a channel before there is a job here; starts no rank and changes nothing but what a question is for. Which
questions there are stands in the table below; what an answer holds, in the module that gives it. Imports the standard
library only, until a question needs more.

[Note: questions] A question is a function of its arguments and of an `ExitStack`, which keeps what must outlive the
answer (a socket that others are to reach) until the survey is over. Arguments and answers are JSON values. A question
that cannot be answered raises `DsrunError`, or `OSError`; anything else is a fault of ours.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from dsrun import __version__
from dsrun.errors import DsrunError

from ..os_errors import refusal_of

#: Of the talk and of what answers hold; both ends must speak the same.
VERSION = 4
#: Questions and who answers them. See [Note: questions].
QUESTIONS = {
    "echo": "dsrun.launcher.survey.server:echo",
    "facts": "dsrun.launcher.preflight.facts:facts",
    "complete_checkpoints": "dsrun.launcher.session.resume_point:complete_folders",
    "listen": "dsrun.launcher.rendezvous.reachability:listen",
    "listen_at": "dsrun.launcher.rendezvous.reachability:listen_at",
    "listen_rails": "dsrun.launcher.rendezvous.reachability:listen_rails",
    "reach": "dsrun.launcher.rendezvous.reachability:reach",
    "probe": "dsrun.launcher.probe.answer:answer",
    "watch": "dsrun.launcher.probe.watch:answer",
    "watch_hold": "dsrun.launcher.probe.watch:hold",
    "bench_memory": "dsrun.launcher.bench.memory:answer",
    "bench_disk": "dsrun.launcher.bench.disk:answer",
    "bench_gpu": "dsrun.launcher.bench.gpu:answer",
    "bench_listen": "dsrun.launcher.bench.network:listen",
    "bench_reach": "dsrun.launcher.bench.network:measure",
    "compare": "dsrun.launcher.sync.receiver:compare",
    "sync_begin": "dsrun.launcher.sync.receiver:begin",
    "sync_write": "dsrun.launcher.sync.receiver:write",
    "sync_end": "dsrun.launcher.sync.receiver:end",
}
#: Between two questions; a front end that was cut off asks no more.
_IDLE_PATIENCE_S = 600.0
_READ_BYTES = 1 << 16

Question = Callable[[dict[str, Any], ExitStack], Any]


def main() -> None:
    """Entry of the process."""
    # What a library prints must not come between the answers.
    answers_fd = os.dup(1)
    os.dup2(2, 1)
    _say(answers_fd, {"version": VERSION, "dsrun": __version__, "python": sys.executable})
    with ExitStack() as keep:
        held = b""
        while select.select([0], [], [], _IDLE_PATIENCE_S)[0] and (data := os.read(0, _READ_BYTES)):
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                _say(answers_fd, answer(json.loads(line), keep))


def answer(question: dict[str, Any], keep: ExitStack) -> dict[str, Any]:
    """Answers one question; never raises.

    Args:
        question: `ask`, its name, and `arguments`, an object.
        keep: stack that keeps what must outlive the answer until the survey is over; see [Note: questions].

    Returns:
        `answer`, or `fault` in words with a `hint` or None.
    """
    name = question.get("ask")
    if name not in QUESTIONS:
        return {
            "fault": f"dsrun {__version__} there knows no question `{name}`",
            "hint": "install one dsrun on all hosts",
        }
    module, _, function = QUESTIONS[name].partition(":")
    try:
        ask: Question = getattr(importlib.import_module(module), function)
        return {"answer": ask(question["arguments"], keep)}
    except DsrunError as error:
        return {"fault": str(error), "hint": error.hint}
    except OSError as error:
        return {"fault": refusal_of(error), "hint": None}
    except Exception:
        # The front end shows it as what it is, and where.
        return {"fault": f"a fault of dsrun: {traceback.format_exc()}", "hint": None}


def echo(arguments: dict[str, Any], keep: ExitStack) -> Any:
    """Gives back what was asked: tells that the host answers, and how fast."""
    return arguments


def _say(fd: int, value: dict[str, Any]) -> None:
    data = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
