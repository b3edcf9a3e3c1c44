"""Torch is asked in a process of its own, and what that process does wrong is told in words."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.bench.figure import Figure
from dsrun.launcher.bench.gpu import answer, measure


def test_matrix_products_are_measured_by_the_torch_of_this_interpreter() -> None:
    with ExitStack() as keep:
        figures = [Figure.from_json(value) for value in answer({}, keep)]
    assert any("matrix product" in one.name and one.unit == "FLOP/s" for one in figures)
    assert all(0 < one.low <= one.median <= one.high and one.repetitions >= 3 for one in figures)


def test_asking_imports_no_torch() -> None:
    code = "import sys, dsrun.launcher.bench.gpu; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no kernel image is available')", "status 1: no kernel image is available"),
        ("import os; os.abort()", "status -6: without a word"),
    ],
)
def test_a_process_that_fails_is_told_with_its_last_line(code: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        measure(command=[sys.executable, "-c", code])


def test_a_process_that_hangs_is_killed_in_time() -> None:
    with pytest.raises(LaunchError, match=r"nothing within 0\.5 s"):
        measure(command=[sys.executable, "-c", "import threading; threading.Event().wait()"], patience_s=0.5)
