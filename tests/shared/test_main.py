"""The entry of `dsrun`, in interpreters of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPT = """
import os, signal, sys

class Interrupt:
    # Ctrl-C at a moment that is always the same one: when this module is imported.
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
import dsrun.__main__
sys.argv = ["dsrun", "ps"]
dsrun.__main__.main()
"""


@pytest.mark.parametrize("name", ["dsrun.launcher.cli", "click", "dsrun.launcher.commands.ps"])
def test_ctrl_c_while_it_starts_shows_no_traceback(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT.format(name=name)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    # Before anything runs, the signal itself ends it; afterwards it is the shell's code for it.
    assert done.returncode in (-signal.SIGINT, 130)
