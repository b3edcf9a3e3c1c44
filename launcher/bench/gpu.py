"""Copies between host and GPUs and matrix products, measured by the torch that jobs would use. Imports none itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from dsrun.errors import LaunchError

from ..isolated_command import isolated_command
from ..process_modules import TORCH_BENCH
from .figure import Figure

#: For torch to be imported, contexts made on all GPUs, and some seconds of work.
PATIENCE_S = 90.0


def answer(arguments: dict[str, Any], keep: ExitStack) -> Any:
    """Answers the question `bench_gpu`; takes no arguments. See [Note: questions] in survey/server."""
    return [one.to_json() for one in measure()]


def measure(*, command: Sequence[str] | None = None, patience_s: float = PATIENCE_S) -> list[Figure]:
    """Measures in a process of its own.

    Args:
        command: command that measures; None means bench_torch by this interpreter.
        patience_s: longest wait for it; then it is killed.

    Raises:
        LaunchError: it failed or took too long, with its last line.
    """
    words = isolated_command(sys.executable, TORCH_BENCH, str(os.getpid()))
    try:
        done = subprocess.run(
            words if command is None else command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience_s,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"torch has measured nothing within {patience_s:g} s", hint="does `nvidia-smi` answer? is the GPU busy?"
        ) from error
    except OSError as error:
        raise LaunchError(f"torch cannot be asked: {error}") from error
    if done.returncode != 0:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "without a word")
        raise LaunchError(f"torch ended with status {done.returncode}: {last.strip()}")
    return [Figure.from_json(value) for value in json.loads(done.stdout)["figures"]]
