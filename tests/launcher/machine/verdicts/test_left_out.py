"""A broken GPU is red by itself, and stops no job whose ranks are known to have others."""

from __future__ import annotations

import pytest

from dsrun.launcher.machine.gpus.left_out import LeftOut, left_out_gpus
from dsrun.launcher.machine.verdict import Context
from dsrun.launcher.machine.verdicts.left_out import left_out_verdicts

LOST = LeftOut(index=1, reason="GPU is lost", is_forbidden=False)
CLOSED = LeftOut(index=2, reason="Insufficient Permissions", is_forbidden=True)


@pytest.mark.parametrize(
    ("context", "levels"),
    [
        (Context(), ["red", "amber", "amber", "red"]),
        (Context(counts_gpus=True), ["amber", "amber", "amber", "amber"]),
    ],
)
def test_what_is_broken_is_red_unless_ranks_are_counted_against_what_is_left(
    context: Context, levels: list[str]
) -> None:
    left_out = [*left_out_gpus([LOST, CLOSED], uncut=[3], unlisted=1)]
    found = [*left_out_verdicts(left_out, context=context)]
    assert [one.level for one in found] == levels
    assert [one.path for one in found] == ["gpus.1.lost", "gpus.2.lost", "gpus.3.state.mig_slices", "gpus_unlisted"]
    assert [(one.text, one.fix) for one in found] == [(one.text, one.fix) for one in left_out]
