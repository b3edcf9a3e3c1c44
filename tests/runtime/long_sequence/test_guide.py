"""The guide's Python runs, and its figures are the formulas'."""

from __future__ import annotations

import re
from pathlib import Path

from dsrun.runtime.long_sequence.loss_kernels import loss_bytes

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "long-sequences.md").read_text(encoding="utf-8")
GIB = 1 << 30


def test_the_guides_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {})


def test_figures_of_llama_3_are_those_of_the_formulas() -> None:
    tokens, width, vocab, chunk = 8192, 4096, 128256, 512
    taken = loss_bytes(tokens, width, vocab, size=2, chunk=chunk)
    figures = [taken.kept, tokens * vocab * 4, taken.forward, tokens * vocab * 12]
    said = "keep {:.2f} GiB instead of {:.1f} GiB, and take at most {:.1f} GiB instead of {:.1f} GiB"
    assert said.format(*(figure / GIB for figure in figures)) in GUIDE
