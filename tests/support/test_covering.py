"""Which cases of several parameters run by default."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from typing import Any

from support.covering import covering, with_all

SCHEDULES = {"1f1b": 1, "gpipe": 2, "zbv": 3}
DTYPES = {"fp32": 32, "bf16": 16}
TIED = {"apart": False, "tied": True}


def of_default(cases: list[Any]) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if not case.marks]


def test_all_cases_are_there_and_named_by_their_values() -> None:
    cases = covering(SCHEDULES, DTYPES, TIED)
    assert [case.values for case in cases] == list(product(SCHEDULES.values(), DTYPES.values(), TIED.values()))
    assert cases[0].id == "1f1b-fp32-apart"


def test_each_pair_of_values_has_a_case_by_default() -> None:
    axes = (SCHEDULES, DTYPES, TIED)
    kept = of_default(covering(*axes))
    assert len(kept) == 6
    for one, other in combinations(range(3), 2):
        pairs = set(product(axes[one].values(), axes[other].values()))
        assert {(case[one], case[other]) for case in kept} == pairs


def test_each_value_alone_has_fewer_cases_in_which_the_others_meet_evenly() -> None:
    orders = {str(number): number for number in range(8)}
    kept = of_default(covering(orders, DTYPES, TIED, together=1))
    assert [case[0] for case in kept] == [*range(8)]
    assert Counter(case[1:] for case in kept) == dict.fromkeys(product(DTYPES.values(), TIED.values()), 2)


def test_some_values_of_a_case_run_by_default_and_all_of_them_besides() -> None:
    cases = with_all({"fp32": (1,), "bf16": (1, 2)}, (1, 2))
    assert [(case.id, case.values) for case in cases] == [
        ("fp32", ("fp32", (1,))),
        ("bf16", ("bf16", (1, 2))),
        ("fp32-all", ("fp32", (1, 2))),
    ]
    assert of_default(cases) == [("fp32", (1,)), ("bf16", (1, 2))]


def test_left_out_cases_say_what_stands_for_them() -> None:
    marks = [case.marks[0] for case in covering(SCHEDULES, DTYPES, TIED) if case.marks]
    assert [(mark.name, mark.args) for mark in marks] == [("soak", ("6 of 12 cases have each 2 values together",))] * 6
