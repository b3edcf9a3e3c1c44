"""scripts/bench/offload.py --only step runs, and finds the bits of all its ways equal before it times them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "offload.py"


@pytest.mark.timeout(300)
def test_a_quick_run_has_a_row_for_every_way(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = [sys.executable, str(SCRIPT), "--quick", "--only", "step", "--threads", "1", "--json", str(found)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "| one pass |" in done.stdout
    (table,) = json.loads(found.read_text())["tables"]
    rows = {row["name"]: row["values"] for row in table["rows"]}
    assert rows.keys() >= {"floor", "one pass", "passes of torch"}
    assert all(len(values) == 2 and min(values) > 0 for values in rows.values())
    demands = [verdict["demand"] for verdict in table["verdicts"]]
    assert demands[:2] == ["floor by one pass >= 0.8", "DeepSpeed by one pass >= 1.4"]
