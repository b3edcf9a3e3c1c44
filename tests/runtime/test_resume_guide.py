"""docs/guides/resume.md: its script trains, goes on when it is run again, and its sampler counts what it hands out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs/guides/resume.md").read_text()
SAID = "print('steps', engine.global_steps)\n"


def test_the_examples_run_and_go_on(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    assert len(blocks) == 2
    # A process of its own: a loader's workers are its children, and signals are its own.
    script = tmp_path / "train.py"
    for steps in (40, 60):
        training, sampling = (block.replace("40", str(steps)) for block in blocks)
        at_start = training.replace("while engine", "print('from', engine.global_steps)\nwhile engine")
        script.write_text(f"{at_start}{SAID}{sampling}print(state)\n")
        done = subprocess.run(
            [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"from {steps - 40 if steps == 40 else 40}\n" in done.stdout
        assert f"steps {steps}\n" in done.stdout
        assert "{'data': {'epoch': 1, 'samples_seen': 0, 'seed': 1234}}" in done.stdout
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step60"
