"""Rows of parity: each is tried, and a difference is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpu.parity import Parity, at_stage, config, tried


def good() -> Iterable[str]:
    return ()


def differs() -> Iterator[str]:
    yield "stage 2 differs"
    yield "stage 3 differs"


def breaks() -> Iterator[str]:
    yield "stage 1 differs"
    raise RuntimeError("out of memory")


def test_a_row_that_breaks_does_not_lose_the_others() -> None:
    first, *_, last = tried({"a": breaks, "b": good, "c": differs}, why_lost=lambda: None)
    assert first["rows"]["b"] == {"state": "not run"}
    assert {name: row["state"] for name, row in last["rows"].items()} == {"a": "failed", "b": "ok", "c": "failed"}
    assert last["rows"]["a"]["wrong"] == ["stage 1 differs", "RuntimeError: out of memory"]
    assert last["why"] == "a: stage 1 differs; c: stage 2 differs"


def test_on_a_device_that_is_lost_nothing_more_is_tried() -> None:
    *_, last = tried({"a": good, "b": differs, "c": good}, why_lost=lambda: "CUDA error")
    assert [row["state"] for row in last["rows"].values()] == ["ok", "failed", "not run"]
    assert last["why"].endswith("the device answers nothing any more: CUDA error")


def test_rows_that_are_well_have_no_reason() -> None:
    assert "why" not in list(tried({"a": good}, why_lost=lambda: None))[-1]


def test_a_difference_in_the_last_bit_is_named_with_its_micro_step() -> None:
    class Slower(Parity):
        def _losses(self, config, model=None):  # type: ignore[no-untyped-def]
            stage = config["zero_optimization"]["stage"]
            return [5.0, 4.0 + 1e-15 * (stage == 3), 3.0]

    parity = Slower("cpu", steps=2, stages=(0, 3))
    base = config("fp32", clipping=0.0)
    assert at_stage(base, 3)["zero_optimization"] == {"stage": 3}
    found = list(parity.stream("fp32"))
    assert found == [
        "stage 3 differs from the default stream in micro step 1: 4.000000000000001 and 4.0",
    ]
