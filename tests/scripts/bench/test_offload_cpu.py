"""scripts/bench/offload.py --only cpu runs, and judges what of the step shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "offload.py"


@pytest.mark.timeout(300)
def test_a_quick_run_has_a_table_for_every_length_of_the_step(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = [sys.executable, str(SCRIPT), "--quick", "--only", "cpu", "--json", str(found)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    tables = json.loads(found.read_text())["tables"]
    assert len(tables) == 3
    for table in tables:
        rows = {row["name"]: row["values"] for row in table["rows"]}
        assert all(len(rows[name]) == 2 and min(rows[name]) > 0 for name in ("no step", "in turn", "beside"))
    demands = [[verdict["demand"] for verdict in table["verdicts"]] for table in tables]
    assert demands == [["beside: exposed share of the step <= 0.3"]] * 2 + [[]]
