"""Ranks that were given different tags save under one, warned or not, or none of them saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.tags import one_tag
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld

TOLD = "save_checkpoint: rank 0's tag is 'a', rank 1's is 'b', rank 2's is 'global_step7'"


def tags_of(given: list[str], where_they_differ: Any) -> list[str]:
    def body(collectives: LoopbackCollectives) -> str:
        mine = given[collectives.rank]
        try:
            return one_tag(mine, collectives, device=torch.device("cpu"), where_they_differ=where_they_differ)
        except CheckpointError as error:
            return f"failed: {error}"

    return LoopbackWorld(len(given)).run(body)


@pytest.mark.parametrize("given", [["a"], ["a"] * 3, ["x" * 200] * 2])
@pytest.mark.parametrize("where_they_differ", ["Ignore", "Warn", "Fail"])
def test_one_tag_is_that_tag(given: list[str], where_they_differ: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tags_of(given, where_they_differ) == given
    assert capsys.readouterr().out == ""


def test_different_tags_are_rank_0s_told_once_or_an_error_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["a", "b", "global_step7"]
    assert tags_of(given, "Ignore") == ["a"] * 3
    assert capsys.readouterr().out == ""
    assert tags_of(given, "Warn") == ["a"] * 3
    assert capsys.readouterr().out.startswith(f"{TOLD}; rank 0's is taken")
    assert tags_of(given, "Fail") == [f"failed: {TOLD}"] * 3
