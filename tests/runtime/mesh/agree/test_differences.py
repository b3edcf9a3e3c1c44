"""The first difference of two values is found under its name."""

from __future__ import annotations

import pytest

from dsrun.runtime.mesh.agree.differences import Difference, first_difference


@pytest.mark.parametrize(
    ("first", "second", "path", "values"),
    [
        ({"a": {"lr": 0.1, "z": 1}}, {"a": {"lr": 0.2, "z": 2}}, "a.lr", ("0.1", "0.2")),
        ({"a": 1}, {"a": 1, "b": None}, "b", ("absent", "null")),
        (1, True, "", ("1", "true")),
        ([4, 4], [8, 4], "", ("[4, 4]", "[8, 4]")),
        ([["w", {"shape": [4, 4]}]], [["w", {"shape": [8, 4]}]], "w.shape", ("[4, 4]", "[8, 4]")),
        ([["w", 0], ["b", 0]], [["b", 0], ["w", 0]], "[0]", ('"w"', '"b"')),
        ([["w", 0]], [["w", 0], ["b", 0]], "[1]", ("absent", '"b"')),
        ({"k": [{"a": 1}, {"a": 2}]}, {"k": [{"a": 1}, {"a": 3}]}, "k[1].a", ("2", "3")),
        (list(range(20)), [*range(19), 99], "[19]", ("19", "99")),
        ("x" * 200, "y", "", ('"' + "x" * 116 + "...", '"y"')),
        ({"a": [1]}, {"a": {"b": 1}}, "a", ("[1]", '{"b": 1}')),
    ],
)
def test_the_first_difference_has_its_place_and_both_values(
    first: object, second: object, path: str, values: tuple[str, str]
) -> None:
    assert first_difference(first, second) == Difference(path, *values)


def test_what_is_equal_as_json_has_no_difference() -> None:
    assert first_difference({"b": (1, 2), "a": None}, {"a": None, "b": [1, 2]}) is None
