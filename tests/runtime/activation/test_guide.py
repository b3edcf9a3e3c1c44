"""The guide's Python runs."""

from __future__ import annotations

import re
from pathlib import Path

from dsrun import checkpointing

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "activations.md"


def test_the_guides_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    try:
        exec("\n".join(blocks), {})
    finally:
        checkpointing.reset(forget=True)
