"""scripts/deepspeed_surface.py reads names and parameters from source, without importing it."""

from __future__ import annotations

from pathlib import Path

from deepspeed_surface import CLASSES, lines


def test_public_names_are_recorded_with_their_parameters(tmp_path: Path) -> None:
    sources = {
        "__init__": "from .a import f, _g\nfrom os import path\nfrom torch import *\nraise SystemExit",
        "a": "if True:\n    def f(x, *rest, y=1, **more): ...\nelse:\n    from .b import z\nclass _C: ...\nv = 1",
        "moe": "def f(x): ...",
    }
    for module, name in CLASSES:
        body = (
            "def m(self, x): ...\n @property\n def p(self): ...\n @p.setter\n def p(self, v): ...\n def _n(self): ..."
        )
        sources[module.replace(".", "/")] = f"class {name}:\n def __init__(self, a): ...\n {body}"
    for path, text in sources.items():
        file = tmp_path / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert lines(tmp_path) == sorted(
        [
            ".: f",
            "a: f(x,y,*rest,**more)",
            "moe: f",
            *(f"{module}: {name}(a)" for module, name in CLASSES),
            *(f"class {module}.{name}: m(x) p" for module, name in CLASSES),
        ]
    )
