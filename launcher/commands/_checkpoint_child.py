"""What a checkpoint's conversion needs torch for, in a process of its own: its errors are this one's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dsrun.errors import CheckpointError, DsrunError, InputError, Problem

from ..process_modules import CONVERT_CHECKPOINT, EXPORT_TORCH_FILE

#: How lines begin that are an error's; others are shown as they come.
_PROBLEM = ("error: ", "hint: ")


def torch_file(out: Path, write: Callable[[Path], Path]) -> Path:
    """Makes a torch file by way of a safetensors file beside it, so that no process holds the model.

    Args:
        out: the file.
        write: function that makes a safetensors file in the folder it gets, and returns the path of the file.

    Raises:
        CheckpointError: `out` is there already, or the process failed.
        OSError: the file system refuses.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out}: it is there already", hint="name another file, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        run_child(EXPORT_TORCH_FILE, [str(write(folder)), str(out)])
    finally:
        shutil.rmtree(folder)
    return out


def import_checkpoint(words: Sequence[str]) -> str:
    """Makes a checkpoint of another tool's; returns what there is to say of it.

    Args:
        words: command-line words of the import: source, target and options; see
            `dsrun.runtime.checkpoint.convert.main`.

    Raises:
        DsrunError: what the process says is wrong.
    """
    return run_child(CONVERT_CHECKPOINT, words)


def run_child(module: str, words: Sequence[str]) -> str:
    """Runs a module of the runtime with this interpreter, and returns its output; its talk is shown as it comes.

    Raises:
        DsrunError: with all that it said was wrong, and its exit code.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None, "it is a pipe"
        assert child.stderr is not None, "it is a pipe"
        said: list[str] = []
        for line in child.stderr:
            if line.startswith(_PROBLEM):
                said.append(line.rstrip("\n"))
            else:
                sys.stderr.write(line)
        output = child.stdout.read()  # a line or two, so that it never fills its pipe
    if child.returncode:
        raise _error(said, child.returncode, module)
    return output


def _error(said: Sequence[str], code: int, module: str) -> DsrunError:
    problems: list[Problem] = []
    for line in said:
        if line.startswith("error: "):
            problems.append(Problem(line.removeprefix("error: ")))
        elif line.startswith("hint: ") and problems:
            problems[-1] = Problem(problems[-1].message, line.removeprefix("hint: "))
    if not problems:
        return CheckpointError(f"`python -m {module}` ended with exit code {code}; what it said stands above")
    return (InputError if code == InputError.exit_code else CheckpointError).of(problems)
