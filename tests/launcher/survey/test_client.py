"""Hosts are asked all at once; one that is not there, late or broken is named and holds up none of the others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.survey.client import Answer, HostAnswer, NoAnswer, Survey, why_lost
from dsrun.launcher.survey.server import VERSION
from dsrun.launcher.transport.base import Channel
from dsrun.launcher.transport.local import LocalTransport
from support.channels import RememberingChannels


def host(name: str, python: str | None = None) -> HostSpec:
    return HostSpec(name=name, slots=1, source="test", python=python)


class _Town:
    """Every host is this machine, but for those that have other words, or none."""

    def __init__(self, **words: list[str] | LaunchError) -> None:
        self._words = words
        self._local = LocalTransport()

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        words = self._words.get(host.name, argv)
        if isinstance(words, LaunchError):
            raise words
        return self._local.start(host, words)


def asked(survey: Survey, question: str, **arguments: object) -> dict[str, object]:
    return {name: value_of(answer) for name, answer in survey.ask(question, arguments).items()}


def value_of(answer: Answer) -> object:
    assert isinstance(answer, HostAnswer), answer
    assert answer.asked_s <= answer.answered_s
    return answer.value


def unable(answer: Answer) -> NoAnswer:
    assert isinstance(answer, NoAnswer), answer
    return answer


def test_every_host_answers_in_the_order_of_the_hosts() -> None:
    hosts = [host(f"n{index}") for index in range(3)]
    with Survey(hosts, LocalTransport(), python=sys.executable) as survey:
        assert list(asked(survey, "echo", text="a\nö\udc80")) == ["n0", "n1", "n2"]
        assert asked(survey, "echo", text="a\nö\udc80")["n1"] == {"text": "a\nö\udc80"}
        each = survey.ask("echo", lambda host: {"name": host.name}, host_names=["n0", "n2"])
        assert [value_of(answer) for answer in each.values()] == [{"name": "n0"}, {"name": "n2"}]
        assert survey.unreached() == {}


def test_a_host_that_cannot_be_reached_is_named_and_the_others_answer() -> None:
    town = _Town(away=LaunchError("host away: connection refused", hint="is sshd running?"))
    with Survey([host("here"), host("away")], town, python=sys.executable) as survey:
        assert survey.unreached() == {"away": NoAnswer("connection refused", "is sshd running?", unreached=True)}
        answers = survey.ask("echo", {})
        assert value_of(answers["here"]) == {}
        assert unable(answers["away"]).unreached


def test_a_host_that_answers_too_late_is_given_up() -> None:
    opened = threading.Event()
    first = f"print('{{\"version\": {VERSION}}}', flush=True)"
    silent = [sys.executable, "-c", f"{first}; import sys; sys.stdin.buffer.read()"]
    channels = RememberingChannels(_Town(silent=silent))
    with Survey([host("here"), host("silent")], channels, python=sys.executable) as survey:
        opened.set()
        answers = survey.ask("echo", {}, patience_s=1.0)
        assert unable(answers["silent"]).reason == "no answer to `echo` within 1 s"
        # What would come after all is not taken for the next answer.
        assert "echo" in unable(survey.ask("echo", {})["silent"]).reason
        assert value_of(survey.ask("echo", {})["here"]) == {}
    channels.end_all()


def test_a_host_without_a_first_word_is_given_up_with_the_way_out() -> None:
    channels = RememberingChannels(_Town(silent=[sys.executable, "-c", "import sys; sys.stdin.buffer.read()"]))
    with Survey([host("silent")], channels, python=sys.executable, first_word_s=0.2) as survey:
        answer = survey.unreached()["silent"]
    assert (answer.reason, answer.hint) == ("not reached within 0.2 s", "`--start-timeout 2m` waits longer")
    channels.end_all()


def test_an_interpreter_without_dsrun_is_told_with_the_way_out() -> None:
    words = [sys.executable, "-I", "-S", "-c", "import dsrun.launcher.survey.server"]
    with Survey([host("bare", python="/opt/py/bin/python")], _Town(bare=words), python="python3") as survey:
        answer = survey.unreached()["bare"]
    assert answer.reason == "/opt/py/bin/python there cannot import dsrun: No module named 'dsrun'"
    assert answer.hint == "install dsrun for it, or name another with `python=` in the hostfile"


def test_a_shell_that_talks_at_login_is_told() -> None:
    with Survey([host("chatty")], _Town(chatty=["echo", "Welcome!"]), python="python3") as survey:
        assert "'Welcome!'" in survey.unreached()["chatty"].reason


def test_a_program_that_is_no_python_is_told_with_the_way_out() -> None:
    with Survey([host("odd", python="/bin/true")], _Town(odd=["true"]), python="python3") as survey:
        answer = survey.unreached()["odd"]
    assert answer.reason == "/bin/true there ended with status 0 before its first word"
    assert answer.hint is not None
    assert "`python=`" in answer.hint


def test_another_dsrun_is_told() -> None:
    words = ["echo", '{"version": 99, "dsrun": "9.0"}']
    with Survey([host("new")], _Town(new=words), python="python3") as survey:
        assert survey.unreached()["new"].reason == "another dsrun is there: 9.0"


def test_a_question_that_is_not_known_is_no_end_of_the_talk() -> None:
    with Survey([host("here")], LocalTransport(), python=sys.executable) as survey:
        assert "knows no question `weather`" in unable(survey.ask("weather", {})["here"]).reason
        assert value_of(survey.ask("echo", {})["here"]) == {}


def test_a_surveyor_that_died_is_told_with_its_last_line() -> None:
    lines = ["Traceback (most recent call last):", "MemoryError"]
    assert why_lost("py", None, status=1, last_lines=lines).reason == "its surveyor ended with status 1: MemoryError"
    assert why_lost("py", None, status=None, last_lines=()).reason == "the connection was lost"


def test_a_dsrun_whose_modules_have_other_names_is_another_one_and_no_missing_one() -> None:
    line = (
        "ModuleNotFoundError: No module named 'dsrun.launcher.survey.server'; 'dsrun.launcher.survey' is not a package"
    )
    other = why_lost("py", None, status=1, last_lines=[line])
    assert other.reason.startswith("another dsrun is there: No module named 'dsrun.launcher.survey.server'")
    assert other.hint == "install one dsrun on all hosts"
    none = why_lost("py", None, status=1, last_lines=["ModuleNotFoundError: No module named 'dsrun'"])
    assert none.reason == "py there cannot import dsrun: No module named 'dsrun'"


def test_what_is_raised_meanwhile_ends_the_wait() -> None:
    class Stopped(Exception):
        pass

    asked = threading.Event()

    def stop() -> None:
        if asked.is_set():
            raise Stopped

    first = f"print('{{\"version\": {VERSION}}}', flush=True)"
    silent = [sys.executable, "-c", f"{first}; import sys; sys.stdin.buffer.read()"]
    channels = RememberingChannels(_Town(silent=silent))
    survey = Survey([host("silent")], channels, python=sys.executable, meanwhile=stop)
    with survey:
        asked.set()
        with pytest.raises(Stopped):
            survey.ask("echo", {}, patience_s=100.0)
    channels.end_all()
