from __future__ import annotations

import pytest

from dsrun.contract.profile_request import ProfileRequest, profile_request
from dsrun.errors import InputError


@pytest.mark.parametrize("ranks", [(0, 3), None])
def test_ranks_read_what_the_launcher_has_asked_for(ranks: tuple[int, ...] | None) -> None:
    asked = ProfileRequest(first=10, last=13, ranks=ranks, stacks=True)
    assert profile_request(asked.to_env()) == asked
    assert (asked.has(3), asked.has(2)) == (True, ranks is None)


def test_without_the_variable_nothing_is_asked_for() -> None:
    assert profile_request({}) is None


@pytest.mark.parametrize("text", ["steps=1:2", "[]", "{}", '{"ranks": 3}'])
def test_a_variable_that_holds_no_request_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="DSRUN_PROFILE"):
        profile_request({"DSRUN_PROFILE": text})


def test_one_step_is_said_as_one() -> None:
    assert ProfileRequest(first=3, last=3).steps_text == "step 3"
    assert ProfileRequest(first=3, last=4).steps_text == "steps 3 to 4"
