from __future__ import annotations

from collections.abc import Sequence

import pytest

from dsrun.launcher.console.line_tag import LineTags


@pytest.mark.parametrize(
    ("hosts", "ranks", "text"),
    [
        (["w0"], [0], "[0]"),
        (["w0", "w0"], [1], "[1]"),
        (["w0", "w1"], [1], "[w1:1]"),
        (["w0", "w1"], [0, 1], "[0-1]"),
        (["w0"] * 8, [0, 1, 2, 5], "[0-2,5]"),
    ],
)
def test_a_tag_says_which_ranks_and_the_host_where_there_are_several(
    hosts: list[str], ranks: Sequence[int], text: str
) -> None:
    assert LineTags(hosts).text(ranks, coloured=False) == text


def test_colour_is_the_ranks_own_and_ends_with_the_tag() -> None:
    tags = LineTags(["w0"] * 8)
    assert tags.text([0], coloured=True) == tags.text([6], coloured=True).replace("6]", "0]") == "\x1b[36m[0]\x1b[0m"
    assert tags.text([0, 1], coloured=True) == "\x1b[1m[0-1]\x1b[0m"
