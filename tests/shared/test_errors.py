from __future__ import annotations

import sys
import traceback

import pytest

from dsrun.errors import CheckpointError, ConfigError, DsrunError, InputError, LaunchError, Problem


def test_an_error_renders_each_problem_with_its_way_out() -> None:
    error = ConfigError("ds.json: `stage` is 4", hint="use 3", more=[Problem("ds.json: `lr` is missing")])
    assert error.render() == "error: ds.json: `stage` is 4\nhint: use 3\nerror: ds.json: `lr` is missing"
    assert str(error) == "ds.json: `stage` is 4"
    assert error.hint == "use 3"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python shows notes from 3.11 on")
def test_pythons_own_traceback_shows_the_way_out_and_the_further_problems() -> None:
    error = ConfigError("`stage` is 4", hint="use 3", more=[Problem("`lr` is missing", "set it")])
    text = "".join(traceback.format_exception(error))
    assert text.endswith("ConfigError: `stage` is 4\nhint: use 3\nerror: `lr` is missing\nhint: set it\n")


def test_several_problems_become_one_error_of_the_class_asked_for() -> None:
    error = CheckpointError.of([Problem("a", "b"), Problem("c")])
    assert type(error) is CheckpointError
    assert error.problems == (Problem("a", "b"), Problem("c"))


def test_mistakes_in_the_input_exit_with_2_and_failures_with_1() -> None:
    assert (InputError("").exit_code, ConfigError("").exit_code) == (2, 2)
    assert (DsrunError("").exit_code, LaunchError("").exit_code, CheckpointError("").exit_code) == (1, 1, 1)
