"""scripts/bench/offload.py --only exposed runs, and judges what of a step taken ahead shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "offload.py"


@pytest.mark.timeout(300)
def test_a_quick_run_has_a_table_for_one_rank_and_for_two(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = [sys.executable, str(SCRIPT), "--quick", "--only", "exposed", "--json", str(found)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    tables = json.loads(found.read_text())["tables"]
    assert [table["title"].split(":")[0] for table in tables] == [
        "stage 2, 1 rank",
        "stage 2, 2 ranks",
    ]
    for table in tables:
        rows = {row["name"]: row["values"] for row in table["rows"]}
        assert all(len(rows[name]) == 2 and min(rows[name]) > 0 for name in ("no step", "beside", "ahead"))
        assert [verdict["demand"] for verdict in table["verdicts"]] == ["ahead: exposed share of the step <= 0.3"]
