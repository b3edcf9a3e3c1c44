"""Figures as rows: medians with their spread, and a verdict on whoever is much slower."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.launcher.bench.figure import figure
from dsrun.launcher.bench.rows import measured_rows, pair_rows, slow_gpus, slow_verdicts


def read(rate: float) -> dict[str, Any]:
    return figure("read in order", "B/s", [rate, rate * 0.9, rate * 1.1]).to_json()


def disk(rate: float, **more: Any) -> dict[str, Any]:
    return {"disk": [{"path": "/scratch", "figures": [read(rate)], **more}]}


def pair(one: str, other: str, rate: float) -> dict[str, Any]:
    figures = [figure("round trip", "s", [2e-5] * 3), figure("TCP rate, 4 streams", "B/s", [rate] * 3)]
    return {"from": one, "to": other, "address": "10.0.0.1", "figures": [value.to_json() for value in figures]}


def test_figures_are_rows_with_spread_and_the_median_alone_for_many_hosts() -> None:
    rows = list(measured_rows({**disk(3e9), "gpu": [{"error": "torch took too long", "hint": None}]}))
    assert [(row.label, row.value, row.shared) for row in rows] == [
        ("disk at", "/scratch", "/scratch"),
        ("read in order", "3 GB/s (2.7 to 3.3)", "3 GB/s"),
        ("gpu", "none: torch took too long", "none: torch took too long"),
    ]
    assert rows[1].order == 3e9


def test_a_disk_that_was_read_through_the_cache_says_so() -> None:
    first = next(measured_rows(disk(3e9, direct=False)))
    assert first.value == "/scratch, through the page cache: it refuses O_DIRECT"


def test_a_few_pairs_are_told_one_by_one_and_many_as_a_range() -> None:
    few = [pair("n1", "n2", 2e9), {"from": "n1", "to": "n3", "error": "none of its addresses is reached", "hint": None}]
    assert [(row.label, row.value) for row in pair_rows(few)] == [
        ("n1 - n2", "20 us, 2 GB/s over 10.0.0.1"),
        ("n1 - n3", "none of its addresses is reached"),
    ]
    many = [pair(f"n{index}", "n99", index * 1e9) for index in range(1, 21)]
    assert [(row.label, row.value) for row in pair_rows(many)] == [
        ("round trip", "20 us, from 20 us (n1 - n99) to 20 us (n20 - n99), 20 pairs"),
        ("TCP rate, 4 streams", "11 GB/s, from 1 GB/s (n1 - n99) to 20 GB/s (n20 - n99), 20 pairs"),
    ]


def test_a_host_and_a_way_much_slower_than_usual_are_named() -> None:
    measured = {"n1": disk(3e9), "n2": disk(3.1e9), "n3": disk(1e9)}
    pairs = [pair("n1", "n2", 3e9), pair("n1", "n3", 3e9), pair("n2", "n3", 0.1e9)]
    assert [(one["level"], one["text"], one["hosts"]) for one in slow_verdicts(measured, pairs)] == [
        ("amber", "/scratch: read in order: 1 GB/s, hosts usually reach 3 GB/s", ["n3"]),
        ("amber", "the way between them: 100 MB/s, others reach 3 GB/s", ["n2", "n3"]),
    ]


@pytest.mark.parametrize("slow", [1e9, 2.9e9])
def test_of_two_hosts_nobody_is_usual_and_what_is_nearly_alike_is_no_verdict(slow: float) -> None:
    assert list(slow_verdicts({"n1": disk(3e9), "n2": disk(slow)}, [])) == []
    alike = {"n1": disk(3e9), "n2": disk(2.9e9), "n3": disk(2.5e9)}
    assert list(slow_verdicts(alike, [pair("n1", "n2", 3e9)])) == []


def test_a_gpu_much_slower_than_its_neighbours_is_named() -> None:
    names = [("GPU to host 0", 55e9), ("GPU to host 1", 54e9), ("GPU to host 2", 13e9), ("GPU to host 3", 55e9)]
    names += [("GPU to host, all 4 at once", 100e9), ("bf16 matrix product, GPU 0", 7e14)]
    measured = {"gpu": [{"figures": [figure(name, "B/s", [rate] * 3).to_json() for name, rate in names]}]}
    (verdict,) = slow_gpus(measured)
    assert verdict["text"] == "GPU to host 2: 13 GB/s, its neighbours usually reach 54.5 GB/s"
    assert list(slow_gpus({"gpu": [{"error": "torch took too long", "hint": None}]})) == []
