"""Interpreters whose torch a test of the start is run with: this one, and one whose torch is built for CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

#: Names an interpreter with a CUDA build of torch and dsrun's dependencies; it needs no GPU.
CUDA_PYTHON_ENV = "DSRUN_TEST_CUDA_PYTHON"


def cuda_build() -> str:
    """Returns an interpreter whose torch is built for CUDA; skips the test where there is none."""
    python = os.environ.get(CUDA_PYTHON_ENV, sys.executable)
    if not is_built_for_cuda(python):
        pytest.skip(f"needs torch's CUDA build, but no GPU: {CUDA_PYTHON_ENV} names an interpreter that has it")
    return python


@cache
def is_built_for_cuda(python: str) -> bool:
    """Tells whether an interpreter's torch is built for CUDA."""
    code = "import torch.version; print(torch.version.cuda is not None)"
    shown = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return shown.stdout == "True\n"
