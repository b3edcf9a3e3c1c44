"""Numbers in place of names are resolved where shapes leave one way, and not guessed elsewhere."""

from __future__ import annotations

from dsrun.runtime.checkpoint.convert.parameter_order import match_groups

NAMED = {"w": (3, 2), "b": (3,), "v": (3, 2), "c": (3,)}


def test_groups_by_shape_have_one_way() -> None:
    assert match_groups(NAMED, [[(3, 2), (3, 2)], [(3,), (3,)]]) == [["w", "v"], ["b", "c"]]
    assert match_groups(NAMED, [[(3, 2), (3,), (3, 2), (3,)]]) == [["w", "b", "v", "c"]]


def test_a_frozen_parameter_is_left_out_where_that_is_clear() -> None:
    assert match_groups({**NAMED, "frozen": (9,)}, [[(3, 2), (3,), (3, 2), (3,)]]) == [["w", "b", "v", "c"]]
    assert match_groups(NAMED, [[(3, 2)]]) is None


def test_what_fits_in_no_way_or_in_several_is_not_guessed() -> None:
    assert match_groups(NAMED, [[(4, 2)]]) is None
    assert match_groups(NAMED, [[(3, 2), (3,)], [(3, 2), (3,)]]) is None
    assert match_groups({str(n): (2,) for n in range(40)}, [[(2,)] * 10 for _ in range(4)]) is None
