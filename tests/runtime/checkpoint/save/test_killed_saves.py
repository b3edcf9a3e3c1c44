"""A save that is killed leaves the checkpoint before it or itself. 100 of each: `bash scripts/soak --saves 400`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.killed_saves import kill_while_saving


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_killed_at_a_random_moment_leaves_the_old_or_the_new(
    tmp_path: Path, repeated: bool, asynchronous: bool
) -> None:
    for number in range(3):
        kill_while_saving(tmp_path / str(number), seed=f"{number}", repeated=repeated, asynchronous=asynchronous)
