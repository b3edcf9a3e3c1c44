"""The value of `--profile` says steps, ranks and what is traced; what makes no sense is refused."""

from __future__ import annotations

import click
import pytest

from dsrun.contract.profile_request import ProfileRequest
from dsrun.errors import UsageError
from dsrun.launcher.options.profile import check_profiled_ranks, parse_profile


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("steps=10:13", ProfileRequest(first=10, last=13)),
        ("steps=4", ProfileRequest(first=4, last=4)),
        ("steps=1:2,ranks=all", ProfileRequest(first=1, last=2, ranks=None)),
        ("ranks=3,0-1,steps=1:2", ProfileRequest(first=1, last=2, ranks=(0, 1, 3))),
        ("steps=1:2,ranks=0,3,memory", ProfileRequest(first=1, last=2, ranks=(0, 3), memory=True)),
        ("steps=1:1,stacks,shapes", ProfileRequest(first=1, last=1, stacks=True, shapes=True)),
    ],
)
def test_steps_ranks_and_what_is_traced_are_read(text: str, request_: ProfileRequest) -> None:
    assert parse_profile(text) == request_


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("steps=13:10", "write `steps=10:13`"),
        ("steps=0:3", "count from 1"),
        ("steps=a", "expected steps like `10:13`"),
        ("steps", "got `steps`"),
        ("ranks=0", "names no steps"),
        ("steps=1,ranks=x", "expected ranks like"),
        ("steps=1,ranks=3-1", "expected ranks like"),
        ("steps=1,memory=1", "got `memory=1`"),
        ("steps=1,steps=2", "`steps` twice"),
        ("steps=1,gpu", "got `gpu`"),
        ("", "expected steps=A:B"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, part: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        parse_profile(text)
    assert part in str(refused.value)


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    check_profiled_ranks(ProfileRequest(first=1, last=2, ranks=(0, 1)), 2)
    check_profiled_ranks(ProfileRequest(first=1, last=2, ranks=None), 2)
    with pytest.raises(UsageError, match="there is no rank 7; the job has ranks 0-1"):
        check_profiled_ranks(ProfileRequest(first=1, last=2, ranks=(0, 7)), 2)
