"""Modules that are started by name exist, and each has a `main`."""

from __future__ import annotations

import importlib

import pytest

from dsrun.launcher import process_modules
from dsrun.launcher.survey.server import QUESTIONS

NAMES = {name: value for name, value in vars(process_modules).items() if name.isupper() and isinstance(value, str)}


@pytest.mark.parametrize("name", NAMES)
def test_a_module_that_is_started_by_name_has_a_main(name: str) -> None:
    assert callable(importlib.import_module(NAMES[name]).main)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_to_a_host_names_a_function_that_exists(question: str) -> None:
    module, _, function = QUESTIONS[question].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
