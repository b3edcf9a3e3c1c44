"""A pattern names what it names, and one that names nothing is an error that helps."""

from __future__ import annotations

import pytest

from dsrun.errors import ModelError
from dsrun.runtime.precision.patterns import match_names

NAMES = ["embed", "blocks.0.norm_1", "blocks.0.up", "blocks.1.norm_1", "blocks.1.up", "head"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], set[str]()),
        (["head"], {"head"}),
        (["norm"], {"blocks.0.norm_1", "blocks.1.norm_1"}),
        (["blocks.0"], {"blocks.0.norm_1", "blocks.0.up"}),
        (["blocks.*.up"], {"blocks.0.up", "blocks.1.up"}),
        (["*"], set(NAMES)),
        (["1.up", "embed"], {"blocks.1.up", "embed"}),
    ],
)
def test_a_pattern_matches_anywhere_in_a_name(patterns: list[str], expected: set[str]) -> None:
    assert match_names(patterns, NAMES, key="k", noun="module") == expected


def test_other_signs_stand_for_themselves() -> None:
    with pytest.raises(ModelError):
        match_names(["blocks?0"], NAMES, key="k", noun="module")
    assert match_names(["a+b"], ["xa+bx", "aab"], key="k", noun="module") == {"xa+bx"}


def test_a_pattern_that_matches_nothing_is_named_with_what_is_close() -> None:
    with pytest.raises(ModelError, match=r"`fp8.exclude` has 'hed', which matches the name of no linear layer") as got:
        match_names(["up", "hed"], NAMES, key="fp8.exclude", noun="linear layer")
    assert "`head`" in got.value.render()


def test_without_any_name_the_error_says_so() -> None:
    with pytest.raises(ModelError) as got:
        match_names(["up"], [], key="fp8.exclude", noun="linear layer")
    assert "the model has no linear layer" in got.value.render()
