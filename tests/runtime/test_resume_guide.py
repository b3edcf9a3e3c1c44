"""docs/guides/resume.md: its script trains, goes on when it is run again, and its sampler counts what it hands out."""

from __future__ import annotations

import re
from pathlib import Path

from support.forked_programs import run_programs

GUIDE = (Path(__file__).parents[2] / "docs/guides/resume.md").read_text()
SAID = "print('steps', engine.global_steps)\n"


def test_the_examples_run_and_go_on(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    assert len(blocks) == 2
    programs: list[str] = []
    for steps in (14, 20):  # an epoch has twelve: the first run ends in its second one
        training, sampling = (block.replace("40", str(steps)) for block in blocks)
        at_start = training.replace("while engine", "print('from', engine.global_steps)\nwhile engine")
        where = f"import os; os.chdir({str(tmp_path)!r})\n"
        programs.append(f"{where}{at_start}{SAID}{sampling}print(state)\n")
    # Processes of their own: a loader's workers are their children, and signals are their own.
    for done, first, steps in zip(
        run_programs(programs, modules=["dsrun.runtime.engine.initialize"]), (0, 14), (14, 20), strict=True
    ):
        assert done.code == 0, done.err
        assert f"from {first}\n" in done.out
        assert f"steps {steps}\n" in done.out
        assert "{'data': {'epoch': 1, 'samples_seen': 0, 'seed': 1234}}" in done.out
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step20"
