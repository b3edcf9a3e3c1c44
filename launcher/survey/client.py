"""Asks all hosts at once what is so on each of them, before there is a job there. The other end: survey/server.

Decides nothing: a host that cannot be reached, or cannot answer, is a value like an answer. What is asked, and what
follows from it, is the caller's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from dsrun.errors import LaunchError

from ..hosts.spec import HostSpec
from ..isolated_command import isolated_command
from ..process_modules import SURVEY_SERVER
from ..transport.base import FIRST_WORD_PATIENCE_S, WAIT_LONGER, Channel, Transport
from .server import VERSION

#: For an answer, where the caller says nothing else.
ANSWER_PATIENCE_S = 30.0
#: Hosts between the first knock and the first word: jump hosts refuse more connections than a few dozen.
_OPEN_AT_ONCE = 64
#: For a surveyor to exit once nothing is asked any more.
_CLOSE_PATIENCE_S = 1.0
#: Between two looks at what else there is to do.
_LOOK_S = 0.1
#: Of what a host wrote to stderr; the last lines say why it ended.
_KEPT_LINES = 5

_T = TypeVar("_T")
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """A host's answer.

    Attributes:
        value: the JSON value.
        asked_s: time when the question was sent, by this host's clock, seconds since the epoch.
        answered_s: time when the answer had arrived, by this host's clock, seconds since the epoch.
    """

    value: Any
    asked_s: float
    answered_s: float


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is no answer.

    Attributes:
        reason: reason in words why there is no answer, without the host's name.
        hint: the way out; None where none is known.
        unreached: the host itself could not be reached or runs no dsrun, so that nothing can be asked of it.
    """

    reason: str
    hint: str | None = None
    unreached: bool = False


Answer = HostAnswer | NoAnswer


class Survey:
    """A talk with every host, from `with` to its end.

    Args:
        hosts: hosts to ask; no two have the same name.
        transport: transport that reaches the hosts.
        python: the interpreter on hosts that name none; dsrun must be importable there.
        first_word_s: longest time for a host to be reached and to say its first word; transports have shorter
            time-outs of their own for each step.
        meanwhile: callback that runs now and then on the caller's thread while it waits for hosts.
    """

    def __init__(
        self,
        hosts: Sequence[HostSpec],
        transport: Transport,
        *,
        python: str,
        first_word_s: float = FIRST_WORD_PATIENCE_S,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._meanwhile = meanwhile
        self._first_word_s = first_word_s
        self._caller = threading.get_ident()
        gate = threading.Semaphore(_OPEN_AT_ONCE)
        self._talks = {host.name: _Talk(host, transport, host.python or python, gate) for host in hosts}

    def __enter__(self) -> Survey:
        """Reaches all hosts; those that cannot be reached answer `NoAnswer` from now on."""
        opening = {name: talk.open for name, talk in self._talks.items()}
        _all_at_once(opening, self._first_word_s, lambda: None, meanwhile=self.attend)
        for talk in self._talks.values():
            talk.give_up_opening(self._first_word_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all talks, and with them what the questions kept on the hosts."""
        closing = {name: talk.close for name, talk in self._talks.items()}
        _all_at_once(closing, 4 * _CLOSE_PATIENCE_S, lambda: None, meanwhile=lambda: None)

    def attend(self) -> None:
        """Calls `meanwhile`; for a caller that waits for these hosts elsewhere too. Other threads call for nothing."""
        if threading.get_ident() == self._caller:
            self._meanwhile()

    def unreached(self) -> dict[str, NoAnswer]:
        """Returns the hosts that nothing can be asked of any more, by name."""
        return {name: talk.reason_over for name, talk in self._talks.items() if talk.reason_over is not None}

    def ask(
        self,
        question: str,
        arguments: Arguments | Callable[[HostSpec], Arguments],
        *,
        host_names: Sequence[str] | None = None,
        patience_s: float = ANSWER_PATIENCE_S,
    ) -> dict[str, Answer]:
        """Asks a question of many hosts at once.

        Args:
            question: its name, see `server.QUESTIONS`.
            arguments: arguments of the question, or a function that makes them for each host.
            host_names: names of the hosts to ask; None asks all.
            patience_s: a host that has not answered by then is given up.

        Returns:
            by name, in the order of the hosts: its answer, or why there is none.
        """
        talks = {name: talk for name, talk in self._talks.items() if host_names is None or name in host_names}
        calls: dict[str, Callable[[], Answer]] = {}
        for name, talk in talks.items():
            given = arguments(talk.host) if callable(arguments) else arguments
            calls[name] = lambda talk=talk, given=given: talk.ask(question, given)
        late = NoAnswer(f"no answer to `{question}` within {patience_s:g} s", "is the host busy, or its disk stuck?")
        answers = _all_at_once(calls, patience_s, lambda: late, meanwhile=self.attend)
        for name, given_answer in answers.items():
            if given_answer is late:
                # An answer that comes after all would be taken for that of the next question.
                talks[name].end(late)
        return answers


class _Talk:
    """The talk with one host. Its methods block; each is called by one thread at a time."""

    def __init__(self, host: HostSpec, transport: Transport, python: str, gate: threading.Semaphore) -> None:
        self.host = host
        #: Set for good once nothing can be asked any more.
        self.reason_over: NoAnswer | None = None
        self._transport = transport
        self._python = python
        self._gate = gate
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._is_open = False
        self._read = b""
        self._last_lines: list[str] = []
        self._stderr_over = threading.Event()

    def open(self) -> None:
        """Reaches the host and hears its first word."""
        with self._gate:
            if self.reason_over is not None:
                return
            try:
                channel = self._transport.start(self.host, isolated_command(self._python, SURVEY_SERVER))
            except LaunchError as error:
                self.end(NoAnswer(str(error).removeprefix(f"host {self.host.name}: "), error.hint, unreached=True))
                return
            with self._lock:
                self._channel = channel
                is_late = self.reason_over is not None
            threading.Thread(target=self._read_stderr, args=(channel,), daemon=True).start()
            if is_late:
                channel.kill()
                return
            first = self._next()
            if isinstance(first, NoAnswer):
                self.end(NoAnswer(first.reason, first.hint, unreached=True))
            elif first.get("version") != VERSION:
                theirs = first.get("dsrun")
                self.end(
                    NoAnswer(f"another dsrun is there: {theirs}", "install one dsrun on all hosts", unreached=True)
                )
            self._is_open = True

    def give_up_opening(self, patience_s: float) -> None:
        """Ends a talk that has not begun in time, which was `patience_s` long."""
        if not self._is_open and self.reason_over is None:
            self.end(NoAnswer(f"not reached within {patience_s:g} s", WAIT_LONGER, unreached=True))

    def ask(self, question: str, arguments: Arguments) -> Answer:
        """Asks, and waits for the answer."""
        if self.reason_over is not None or self._channel is None:
            return self.reason_over or NoAnswer("not reached", unreached=True)
        line = json.dumps({"ask": question, "arguments": arguments}).encode() + b"\n"
        asked_s = time.time()
        try:
            self._channel.send(line)
        except OSError as error:
            said = self._lost(f"the connection was lost: {error}")
        else:
            said = self._next()
        if isinstance(said, NoAnswer):
            self.end(said)
            return said
        if "fault" in said:
            return NoAnswer(said["fault"], said["hint"])
        return HostAnswer(said["answer"], asked_s, time.time())

    def end(self, reason: NoAnswer) -> None:
        """Ends the talk before its time; may be called beside a method that blocks, which then returns."""
        with self._lock:
            self.reason_over = self.reason_over or reason
            channel = self._channel
        if channel is not None:
            channel.kill()

    def close(self) -> None:
        """Ends the talk."""
        channel = self._channel
        if channel is None:
            return
        with suppress(OSError):
            # Where it is gone already, that is what was wanted.
            channel.end_input()
        if channel.wait(_CLOSE_PATIENCE_S) is None:
            channel.kill()
            channel.wait(_CLOSE_PATIENCE_S)
        with suppress(OSError):
            while channel.read_stdout():
                pass
        self._stderr_over.wait(_CLOSE_PATIENCE_S)

    def _next(self) -> dict[str, Any] | NoAnswer:
        """Reads the next line of the other end."""
        assert self._channel is not None, "there is a channel"
        parts = [self._read]
        while b"\n" not in parts[-1]:
            data = self._channel.read_stdout()
            if not data:
                return self._lost(None)
            parts.append(data)
        line, _, self._read = b"".join(parts).partition(b"\n")
        try:
            value: Any = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            shown = line[:200].decode("utf-8", "backslashreplace")
            return NoAnswer(f"answered {shown!r}, which is no word of dsrun's", "what does its shell print at login?")
        return value

    def _lost(self, reason: str | None) -> NoAnswer:
        """Says why a talk ended that should have gone on."""
        assert self._channel is not None, "there was a channel"
        self._stderr_over.wait(_CLOSE_PATIENCE_S)
        status = self._channel.wait(_CLOSE_PATIENCE_S)
        if reason is None and status is not None and not (self._is_open or self._last_lines):
            reason = f"{self._python} there ended with status {status} before its first word"
            return NoAnswer(reason, "is it a Python that has dsrun? `python=` in the hostfile names another")
        return why_lost(self._python, reason, status=status, last_lines=self._last_lines)

    def _read_stderr(self, channel: Channel) -> None:
        held = b""
        try:
            while data := channel.read_stderr():
                *lines, held = (held + data).split(b"\n")
                self._keep(lines)
        except OSError:
            # The connection is lost; whoever reads the answers says so.
            pass
        self._keep([held] if held else [])
        self._stderr_over.set()

    def _keep(self, lines: Sequence[bytes]) -> None:
        shown = [line.decode("utf-8", "backslashreplace").rstrip() for line in lines]
        self._last_lines = [*self._last_lines, *(line for line in shown if line)][-_KEPT_LINES:]


def why_lost(python: str, reason: str | None, *, status: int | None, last_lines: Sequence[str]) -> NoAnswer:
    """Says why a surveyor ended, from what it left.

    Args:
        python: the interpreter that ran it.
        reason: description of what this end saw go wrong; None if it saw nothing.
        status: its exit code, None if unknown.
        last_lines: last lines of the surveyor's stderr.
    """
    last = last_lines[-1] if last_lines else ""
    if last.startswith("ModuleNotFoundError: No module named 'dsrun."):
        # There is a dsrun, whose modules have other names.
        return NoAnswer(f"another dsrun is there: {last.partition(': ')[2]}", "install one dsrun on all hosts")
    if last.startswith(("ModuleNotFoundError:", "ImportError:")):
        reason = f"{python} there cannot import dsrun: {last.partition(': ')[2]}"
        return NoAnswer(reason, "install dsrun for it, or name another with `python=` in the hostfile")
    if reason is None:
        reason = "the connection was lost" if status is None else f"its surveyor ended with status {status}"
    return NoAnswer(f"{reason}: {last}" if last else reason)


def _all_at_once(
    calls: Mapping[str, Callable[[], _T]],
    patience_s: float,
    late: Callable[[], _T],
    *,
    meanwhile: Callable[[], None],
) -> dict[str, _T]:
    """Runs each call in a thread of its own; `late()` stands for one that has not returned in time."""
    results: dict[str, _T] = {}

    def run(name: str, call: Callable[[], _T]) -> None:
        results[name] = call()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + patience_s
    for thread in threads:
        while thread.is_alive() and (left_s := until_s - time.monotonic()) > 0:
            thread.join(min(_LOOK_S, left_s))
            meanwhile()
    meanwhile()
    # A result that comes from now on is not looked at any more: the answers are complete here.
    return {name: results[name] if name in results else late() for name in calls}
