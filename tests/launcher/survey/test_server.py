"""A surveyor answers what it knows, says in words what it cannot, and ends with its front end."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack

from dsrun.launcher.isolated_command import isolated_command
from dsrun.launcher.survey.server import QUESTIONS, VERSION, answer


def test_every_question_has_someone_who_answers() -> None:
    import importlib

    for row in QUESTIONS.values():
        module, _, function = row.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), row


def test_an_unknown_question_is_a_fault_in_words() -> None:
    with ExitStack() as keep:
        said = answer({"ask": "weather", "arguments": {}}, keep)
    assert "weather" in said["fault"]
    assert said["hint"] == "install one dsrun on all hosts"


def test_it_says_who_it_is_answers_line_by_line_and_ends_with_its_stdin() -> None:
    lines = [json.dumps({"ask": "echo", "arguments": {"n": n}}) for n in (1, 2)]
    done = subprocess.run(
        isolated_command(sys.executable, "dsrun.launcher.survey.server"),
        input="\n".join([*lines, ""]),
        capture_output=True,
        text=True,
        timeout=30,
    )
    first, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert (first["version"], first["python"]) == (VERSION, sys.executable)
    assert answers == [{"answer": {"n": 1}}, {"answer": {"n": 2}}]
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_heavy_is_imported_before_a_question_needs_it() -> None:
    heavy = ["torch", "numpy", "pydantic", "click", "rich", "psutil", "fabric"]
    code = f"import sys, dsrun.launcher.survey.server; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]"
