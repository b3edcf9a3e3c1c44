"""Ways to run `dsrun` in tests: in this process for what starts nothing, as a process of its own for what does."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from dsrun.launcher.cli import main


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended and what it said."""

    exit_code: int
    stdout: str
    stderr: str


def invoke(*args: str) -> Result:
    """Runs the command line inside this process and catches its exit."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape") for _ in range(2))
    # Engines of earlier tests that nobody has any more say their memory when they are collected: not in between.
    gc.disable()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(args)
    except SystemExit as end:
        code = end.code
    finally:
        gc.enable()
    return Result(code if isinstance(code, int) else 1, _text(out), _text(err))


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode("utf-8", "surrogateescape")


def clean_environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment without what would change dsrun's answers."""
    dropped = ("DSRUN_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_NUM_THREADS", "NO_COLOR")
    # A job of Slurm or MPI around the tests would have them start their ranks elsewhere.
    dropped += ("SLURM", "OMPI_", "PMI", "PALS_", "MV2_")
    # torch's compiler leaves it where a test beside this one has imported it.
    dropped += ("TORCHINDUCTOR_CACHE_DIR",)
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)} | changes


def start_dsrun(
    *args: str | bytes,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    before: str = "",
) -> subprocess.Popen[bytes]:
    """Starts `dsrun` in a session of its own, as a terminal would, with both streams on pipes.

    Args:
        *args: its words.
        cwd: its folder.
        env: its environment; None: this process's without what would change its answers.
        stdin: stdin of the process, as `subprocess.Popen` takes it.
        before: a shell's command to run before it, in its process.
    """
    shell = ["sh", "-c", f'{before} && exec "$@"', "sh"] if before else []
    return subprocess.Popen(
        [*shell, sys.executable, "-m", "dsrun", *args],
        cwd=cwd,
        env=clean_environment() if env is None else dict(env),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run_dsrun(*args: str | bytes, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 60) -> Result:
    """Runs `dsrun` as a process to its end; kills it and fails when it takes too long."""
    with start_dsrun(*args, cwd=cwd, env=env) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"dsrun did not end in {timeout_s}s:\n{_decode(out)}\n{_decode(err)}") from None
    return Result(process.returncode, _decode(out), _decode(err))


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
