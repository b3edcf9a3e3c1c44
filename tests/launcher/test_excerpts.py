from __future__ import annotations

from dsrun.launcher.excerpts import Place, listed, point_at, quoted


def excerpt(line: str, column: int, width: int) -> list[str]:
    problem = point_at("hosts:1:1", line, column=column, width=width, message="wrong", hint="way out")
    assert problem.hint == "way out"
    first, *rest = problem.message.split("\n")
    assert first == "hosts:1:1: wrong"
    return rest


def test_the_caret_stands_under_what_is_meant() -> None:
    assert excerpt("worker slots=x", 14, 1) == ["  worker slots=x", "               ^"]
    assert excerpt("worker slots=x", 1, 6) == ["  worker slots=x", "  ^~~~~~"]


def test_the_caret_may_stand_behind_the_end() -> None:
    assert excerpt("ab", 3, 1) == ["  ab", "    ^"]


def test_a_tab_takes_one_column_and_control_characters_none_of_the_terminal() -> None:
    assert excerpt("a\tb\x1b[2J", 3, 1) == ["  a b?[2J", "    ^"]


def test_a_long_line_is_cut_around_the_caret() -> None:
    line, caret = excerpt("a" * 5000 + "X" + "b" * 5000, 5001, 1)
    assert len(line) == 102
    assert line[caret.index("^")] == "X"


def test_a_mark_never_runs_past_the_line() -> None:
    assert excerpt("abc", 2, 50)[1] == "   ^~"


def test_names_are_quoted_listed_and_cut() -> None:
    assert quoted("a\nb") == "`a?b`"
    assert quoted("x" * 100) == f"`{'x' * 57}...`"
    assert listed(["a"]) == "`a`"
    assert listed(list("abcde")) == "`a`, `b`, `c` and 2 more"


def test_a_part_of_a_place_stays_inside_it() -> None:
    assert Place(3, 10, 5).part(2, 1) == Place(3, 12, 1)
    assert Place(3, 10, 5).part(2, None) == Place(3, 12, 3)
    assert Place(3, 10, 5).part(9, None) == Place(3, 15, 1)


def test_a_place_of_unknown_width_has_no_parts() -> None:
    assert Place(3, 10, 0).part(4, 2) == Place(3, 10, 0)
