"""Contenders that do not train the same thing are named."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.losses import compare


def part(contender: str, *rows: list[float]) -> dict[str, Any]:
    return {"state": "ok", "result": {"contender": contender, "rows": [{"tokens": 8, "losses": row} for row in rows]}}


def compared(*parts: dict[str, Any], first: str = "plain") -> dict[str, Any]:
    named = {f"llama {one['result']['contender']} round 0": one for one in parts}
    return compare({**named, "parity": part("dsrun-9", [1.0, 1.0])}, first=first, beginning="llama ", tolerance=0.01)


def test_losses_that_lie_near_are_ok_with_the_largest_share() -> None:
    row = compared(part("dsrun-1", [10.0, 8.04], [5.0, 4.0]), part("plain", [10.0, 8.0], [5.0, 4.0]))
    assert row["state"] == "ok"
    assert row["result"]["against"] == "plain"
    assert row["result"]["largest difference"] == {"dsrun-1": pytest.approx(0.005)}


@pytest.mark.parametrize("wrong", [8.2, 7.5, float("nan"), float("inf")])
def test_losses_that_lie_apart_fail_and_name_both_contenders_and_the_step(wrong: float) -> None:
    row = compared(part("plain", [10.0, 8.0]), part("fsdp2", [10.0, wrong]), part("dsrun-1", [10.0, 8.0]))
    assert row["state"] == "failed"
    assert row["why"] == (
        f"fsdp2 and plain train different things: losses {wrong:.5f} and 8.00000 in step 1 of 8 tokens"
    )


def test_without_the_first_contender_the_others_are_held_against_the_next() -> None:
    row = compared(part("dsrun-1", [10.0]), part("dsrun-2", [12.0]))
    assert "dsrun-2 and dsrun-1 train different things" in row["why"]


def test_who_computes_alone_and_who_did_not_run_are_no_contenders() -> None:
    failed = {"state": "failed", "result": {"contender": "deepspeed-1", "rows": []}}
    row = compared(part("plain", [10.0]), part("compute", [3.0]), failed)
    assert row == {"state": "not run", "why": "fewer than two contenders ran"}


def test_a_contender_that_stopped_early_is_held_against_what_it_did() -> None:
    row = compared(part("plain", [10.0], [5.0]), part("fsdp2", [10.0]))
    assert row["state"] == "ok"
