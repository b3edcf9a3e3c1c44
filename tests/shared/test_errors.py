from __future__ import annotations

from dsrun.errors import CheckpointError, ConfigError, DsrunError, InputError, LaunchError, Problem


def test_an_error_renders_each_problem_with_its_way_out() -> None:
    error = ConfigError("ds.json: `stage` is 4", hint="use 3", more=[Problem("ds.json: `lr` is missing")])
    assert error.render() == "error: ds.json: `stage` is 4\nhint: use 3\nerror: ds.json: `lr` is missing"
    assert str(error) == "ds.json: `stage` is 4"
    assert error.hint == "use 3"


def test_several_problems_become_one_error_of_the_class_asked_for() -> None:
    error = CheckpointError.of([Problem("a", "b"), Problem("c")])
    assert type(error) is CheckpointError
    assert error.problems == (Problem("a", "b"), Problem("c"))


def test_mistakes_in_the_input_exit_with_2_and_failures_with_1() -> None:
    assert (InputError("").exit_code, ConfigError("").exit_code) == (2, 2)
    assert (DsrunError("").exit_code, LaunchError("").exit_code, CheckpointError("").exit_code) == (1, 1, 1)
