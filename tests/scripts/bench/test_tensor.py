"""scripts/bench/tensor.py runs, its contenders train one model alike, and it judges what it finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "tensor.py"


def tables_of(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    """Runs the smallest jobs of a section; that contenders' losses agree is the script's own demand."""
    found = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--quick", *words, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    tables: list[dict[str, Any]] = json.loads(found.read_text())["tables"]
    assert all(table["title"] in done.stdout for table in tables)
    return tables


def demands_of(table: dict[str, Any]) -> dict[str, bool | None]:
    return {verdict["demand"]: verdict["met"] for verdict in table["verdicts"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("section", "contenders"),
    [
        ("steps", ["dsrun", "torch"]),
        pytest.param("bf16", ["torch"], marks=pytest.mark.soak("the same jobs in fp32")),
    ],
)
def test_every_contender_takes_the_steps_of_one_rank(section: str, contenders: list[str], tmp_path: Path) -> None:
    (table,) = tables_of(tmp_path, "--only", section, "--contenders", *contenders)
    rows = {"one rank", *contenders}
    found = {row["name"]: row["values"] for row in table["rows"]}
    assert found.keys() == rows | {f"{row}, CPU of all ranks" for row in rows}
    assert all(len(values) == 2 and min(values) > 0 for values in found.values())
    demands = demands_of(table)
    assert demands.keys() == {
        "dsrun by torch <= 0.9",
        "dsrun by deepspeed, stage 0 <= 1",
        "dsrun by deepspeed, stage 1 <= 1",
    }
    assert (demands["dsrun by torch <= 0.9"] is not None) == ("dsrun" in contenders)
    assert demands["dsrun by deepspeed, stage 0 <= 1"] is None, "not measured is no verdict"


@pytest.mark.timeout(300)
def test_a_cut_layer_is_judged_by_a_plain_one(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, "--only", "linear")
    assert len(tables) == 3
    for table, limit in zip(tables, (5, 25, 25), strict=True):
        demands = [demand for demand in demands_of(table) if "over Linear, forward <=" in demand]
        assert demands == [f"{layer}, forward, over Linear, forward <= {limit} us" for layer in ("row", "column")]
        rows = {row["name"]: row["median"] for row in table["rows"]}
        if limit == 5:  # one rank sums nothing, and differs from a plain layer by less than a busy machine's noise
            continue
        # A sum over ranks stands in a row's forward, and in a column's backward.
        assert rows["row, forward"] > rows["Linear, forward"]
        assert rows["column, forward and backward"] > rows["Linear, forward and backward"]


@pytest.mark.soak("tests/runtime/engine/test_planned_traffic.py counts what layers over ranks send")
@pytest.mark.timeout(300)
def test_a_step_sends_what_the_model_s_shape_says(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, "--only", "bytes")
    assert [table["title"].partition(": ")[2] for table in tables] == [
        "dsrun",
        "dsrun, whole logits",
        "dsrun, slices of the sequence",
    ]
    assert all(all(demands_of(table).values()) for table in tables), tables
