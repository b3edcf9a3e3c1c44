from __future__ import annotations

import pytest

from dsrun.launcher.options.resubmit_args import divide


@pytest.mark.parametrize(
    ("words", "before", "behind"),
    [
        ([], [], []),
        (["train.py", "--lr", "1"], ["train.py", "--lr", "1"], []),
        (["train.py", "--", "--nodes", "2"], ["train.py"], ["--nodes", "2"]),
        (["train.py", "--"], ["train.py"], []),
        (["--", "-N2"], [], ["-N2"]),
        (["train.py", "--", "--config", "mine", "--", "-N2"], ["train.py", "--", "--config", "mine"], ["-N2"]),
    ],
)
def test_words_are_divided_at_the_last_double_dash(words: list[str], before: list[str], behind: list[str]) -> None:
    assert divide(words) == (before, behind)
