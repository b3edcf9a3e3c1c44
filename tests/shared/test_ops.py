"""DeepSpeed's optimizer classes are where scripts import them from, and importing costs nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

NAMES = {
    "adam": ["DeepSpeedCPUAdam", "FusedAdam"],
    "lamb": ["FusedLamb"],
    "lion": ["DeepSpeedCPULion", "FusedLion"],
    "adagrad": ["DeepSpeedCPUAdagrad"],
}


@pytest.mark.parametrize("module", NAMES)
def test_every_class_is_there(module: str) -> None:
    face = importlib.import_module(f"dsrun.ops.{module}")
    assert dir(face) == NAMES[module]
    for name in NAMES[module]:
        assert getattr(face, name) is getattr(
            importlib.import_module("dsrun.runtime.optim.algorithms.deepspeed_classes"), name
        )
    with pytest.raises(AttributeError, match=rf"module 'dsrun\.ops\.{module}' has no attribute 'Adam'"):
        _ = face.Adam


def test_importing_them_imports_no_torch() -> None:
    program = (
        "import dsrun.ops.adam, dsrun.ops.lamb, dsrun.ops.lion, dsrun.ops.adagrad, sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
