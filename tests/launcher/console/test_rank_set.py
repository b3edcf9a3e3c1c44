from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.errors import UsageError
from dsrun.launcher.console.rank_set import format_rank_set, parse_rank_set


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", {0}), ("0,8-11", {0, 8, 9, 10, 11}), ("3-3", {3}), ("11,0-1,1", {0, 1, 11}), (" 1 , 2 - 3 ", {1, 2, 3})],
)
def test_ranks_and_spans(text: str, ranks: set[int]) -> None:
    assert parse_rank_set(text, 12) == ranks


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("", 4, "`--ranks `: expected ranks and spans like `0,8-11`, got ''"),
        ("0,,1", 4, "`--ranks 0,,1`: expected ranks and spans like `0,8-11`, got ''"),
        ("a", 4, "`--ranks a`: expected ranks and spans like `0,8-11`, got 'a'"),
        ("-1", 4, "`--ranks -1`: expected ranks and spans like `0,8-11`, got '-1'"),
        ("1-2-3", 4, "`--ranks 1-2-3`: expected ranks and spans like `0,8-11`, got '1-2-3'"),
        ("3-1", 4, "`--ranks 3-1`: 3-1 ends before it begins"),
        ("0,4", 4, "`--ranks 0,4`: there is no rank 4; the job has ranks 0-3"),
        ("0-999999999", 4, "`--ranks 0-999999999`: there is no rank 999999999; the job has ranks 0-3"),
        ("1", 1, "`--ranks 1`: there is no rank 1; the job has rank 0 only"),
    ],
)
def test_what_is_wrong_is_named(text: str, world_size: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rank_set(text, world_size)
    assert str(caught.value) == message


@given(st.frozensets(st.integers(0, 63), min_size=1))
def test_what_is_written_reads_back(ranks: frozenset[int]) -> None:
    assert parse_rank_set(format_rank_set(ranks), 64) == ranks


def test_runs_of_ranks_are_spans() -> None:
    assert format_rank_set([3, 1, 0, 2, 9, 7]) == "0-3,7,9"
