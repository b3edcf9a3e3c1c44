"""scripts/bench/offload.py --only params runs, and fetches no block that lies in a slot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "offload.py"


@pytest.mark.timeout(300)
def test_a_quick_run_has_a_table_for_every_pace_of_the_bus(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = [sys.executable, str(SCRIPT), "--quick", "--only", "params", "--json", str(found)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    tables = json.loads(found.read_text())["tables"]
    assert len(tables) == 3
    for table in tables:
        rows = {row["name"]: row for row in table["rows"]}
        assert all(len(row["values"]) == 2 and min(row["values"]) > 0 for row in rows.values())
        assert table["verdicts"][0]["demand"] == "ahead: floor by measured >= 0.85"
    # 4 blocks forward and backward, less those that the slots hold at the turn.
    assert [done.stdout.count(f"{copies} copies |") for copies in (7, 6, 5)] == [3, 3, 3]
