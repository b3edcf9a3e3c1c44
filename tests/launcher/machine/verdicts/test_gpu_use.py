"""Who is on a GPU is told with what is left of it; only a job that cannot go elsewhere fails on one that is full."""

from __future__ import annotations

import pytest

from dsrun.launcher.machine.verdict import Context
from dsrun.launcher.machine.verdicts.gpu_use import is_full, use_remarks

GIB, MIB = 1 << 30, 1 << 20
NEEDS = Context(needs_gpus=True)
MAY_MOVE = Context(needs_gpus=True, takes_free_gpus=True)
BOB = ["pid 4242 of user bob"]


def said(used_by: list[str], free: int | None, context: Context) -> list[tuple[str, str]]:
    found = [*use_remarks(used_by, free_bytes=free, total_bytes=80 * GIB, context=context)]
    assert all(fix and path == "state.processes" for _, _, fix, path in found)
    return [(level, text) for level, text, _, _ in found]


@pytest.mark.parametrize("context", [Context(), NEEDS, MAY_MOVE])
def test_who_is_there_is_told_with_what_is_left(context: Context) -> None:
    text = "used by pid 4242 of user bob, 19.0 GiB of 80.0 GiB free"
    assert said(BOB, 19 * GIB, context) == [("amber", text)]
    assert said([*BOB, "pid 7"], None, context) == [("amber", "used by pid 4242 of user bob, pid 7")]
    assert said([], 19 * GIB, context) == []


@pytest.mark.parametrize(("context", "level"), [(NEEDS, "red"), (MAY_MOVE, "amber"), (Context(), None)])
def test_a_full_gpu_fails_a_rank_that_is_sure_to_take_it(context: Context, level: str | None) -> None:
    assert said([], 0, context) == ([] if level is None else [(level, "full, 0 B of 80.0 GiB free")])
    assert said(BOB, 0, context)[0][0] == (level or "amber")


@pytest.mark.parametrize(("free", "full"), [(0, True), (512 * MIB - 1, True), (512 * MIB, False), (None, False)])
def test_a_gpu_is_full_where_no_rank_starts(free: int | None, full: bool) -> None:
    assert is_full(free) is full
