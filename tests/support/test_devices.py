"""All cases run on the CPU, and those that are chosen on a GPU too."""

from __future__ import annotations

import pytest

from support.devices import on_devices


def test_chosen_cases_are_there_twice_the_second_time_marked() -> None:
    found = on_devices(["a", "b"], on_gpu=["b"])
    assert [(each.id, each.values) for each in found] == [
        ("cpu-a", ("cpu", "a")),
        ("cpu-b", ("cpu", "b")),
        ("cuda-b", ("cuda", "b")),
    ]
    assert [[mark.name for mark in each.marks] for each in found] == [[], [], ["cuda"]]
    assert on_devices([("a", 1)], on_gpu=[])[0].values == ("cpu", "a", 1)


def test_a_case_that_there_is_not_is_no_case_on_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"no such cases: \['c'\]"):
        on_devices(["a", "b"], on_gpu=["c"])
