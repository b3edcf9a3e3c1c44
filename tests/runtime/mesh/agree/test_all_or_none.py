"""A failure of one rank is raised on all of them, with its cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.errors import CheckpointError, DsrunError, InputError
from dsrun.runtime.mesh.agree.all_or_none import all_or_none
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld

CPU = torch.device("cpu")


def outcomes(size: int, errors: dict[int, Exception]) -> list[Any]:
    """What each rank gets or is raised on it, where the ranks in `errors` fail."""

    def body(collectives: LoopbackCollectives) -> Any:
        def work() -> int:
            if collectives.rank in errors:
                raise errors[collectives.rank]
            return collectives.rank

        try:
            return all_or_none(work, collectives, device=CPU, label="test", where="thing")
        except DsrunError as error:
            return error

    return LoopbackWorld(size).run(body)


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_gets_what_its_work_gave(size: int) -> None:
    assert outcomes(size, {}) == list(range(size))


def test_the_first_rank_that_failed_is_named_with_its_cause_and_hint() -> None:
    found = outcomes(3, {1: CheckpointError("a is broken", hint="mend it"), 2: ValueError("b")})
    assert [type(error) for error in found] == [CheckpointError] * 3
    assert (str(found[0]), found[0].hint) == ("thing: rank 1: a is broken", "mend it")
    assert str(found[1]) == "a is broken"
    assert str(found[2]) == "thing: ValueError: b"


def test_an_error_that_all_ranks_have_is_each_ones_own() -> None:
    found = outcomes(2, {0: InputError("no folder"), 1: InputError("no folder")})
    assert [type(error) for error in found] == [InputError] * 2
    (alone,) = outcomes(1, {0: KeyError("step")})
    assert isinstance(alone, CheckpointError)
    assert str(alone) == "thing: KeyError: 'step'"


def test_an_error_of_another_kind_is_of_one_kind_on_all_ranks() -> None:
    assert [type(error) for error in outcomes(2, {1: InputError("no folder")})] == [CheckpointError] * 2
