"""What `bash scripts/gpu_check` gives all parts of a run alike."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_every_part_has_matrix_products_that_repeat_themselves(tmp_path: Path) -> None:
    # Without it torch refuses the first one of parity, which asks for deterministic algorithms.
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$CUBLAS_WORKSPACE_CONFIG $PYTHONPATH $*"\n')
    python.chmod(0o755)
    shown = subprocess.run(
        ["bash", str(SCRIPTS / "gpu_check"), "--list"],
        env={**os.environ, "PYTHON": str(python), "PYTHONPATH": "/mine"},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    sources = SCRIPTS.parent / "src"
    assert shown.stdout == f":4096:8 {sources}:{SCRIPTS}:/mine -m gpu.check --list\n"
