"""Figures of the floors stay when a later one cannot be taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.floors import measured
from gpu.offload_floor import Machine, floor_s, rows

_CPU = torch.device("cpu")
MEASURED = {"to_device": 1.0, "to_host": 0.5, "host_step": 1.0}


def test_buses_are_measured_first_and_kept_where_the_drive_cannot_be(tmp_path: Path) -> None:
    first, *_, last = measured(_CPU, folder=tmp_path / "gone", mib=1)
    assert list(first) == ["to_device"]
    assert set(last) == {"to_device", "to_host", "host_step", "no_disk"}
    assert "gone" in str(last["no_disk"])


@pytest.mark.parametrize(
    ("tier", "micro_batches", "expected_s"),
    [
        ("gpu", 2, 6.0),
        # Gradients (4 s in bf16) outlast backward, the host's step (28 s) the next forward.
        ("cpu", 1, 4.0 + 28.0),
        # Sums in fp32 take 8 s; the first micro batch computes alone.
        ("cpu", 2, 3.0 + 8.0 + 28.0),
        # Parameters take 2 s for each pass of each micro batch.
        ("ram", 2, 2.0 + 2.0 + 8.0 + 28.0),
        ("disk", 1, 4.0 + 12.0 / 0.5 + 12.0),
    ],
)
def test_a_floor_is_what_nothing_can_hide(tier: str, micro_batches: int, expected_s: float) -> None:
    machine = Machine(**MEASURED, disk_read=0.5, disk_write=1.0)
    took_s = floor_s(tier, numel=1, micro_batches=micro_batches, forward_s=1.0, backward_s=2.0, machine=machine)
    assert took_s == pytest.approx(expected_s)


def part(contender: str, **row: float) -> dict[str, Any]:
    one = {"tokens": 8, "micro_batches": 1, "seconds": [64.0], **row}
    return {"state": "ok", "result": {"contender": contender, "parameters": 1, "rows": [one]}}


def test_without_a_drive_other_tiers_have_their_floors() -> None:
    parts = {
        "floors": {"state": "ok", "result": {**MEASURED, "no_disk": "refused"}},
        "offload 7B compute": part("compute", forward_s=1.0, backward_s=2.0),
        "offload 7B dsrun-cpu": part("dsrun-cpu"),
        "offload 7B dsrun-disk": part("dsrun-disk"),
        "offload 7B losses": {"state": "ok", "result": {"tolerance": 0.03}},
    }
    cpu, disk = rows(parts)
    assert (cpu["floor_s"], cpu["of_floor"]) == (32.0, 0.5)
    assert "floor_s" not in disk


def test_without_floors_steps_stand_alone() -> None:
    (row,) = rows({"offload 7B dsrun-cpu": part("dsrun-cpu")})
    assert row["seconds"] == 64.0
    assert "floor_s" not in row
