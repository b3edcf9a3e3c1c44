"""What the first word is, and whether it can be started at all, before anything is. Starts and imports nothing."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsrun.errors import Problem, UsageError

from .foreign_options import VERBS_INSTEAD
from .import_variables import is_read_at_import
from .launch_plan import Program, ProgramKind, StartMethod
from .script_variables import VariableAssignment, settings_before_torch

#: What compiles, what imports torch's compiler by itself, and torch's optimizers, which do so where a script makes one
#: before `dsrun.initialize` has them wait. Names only: a word too many costs a second, a missing one that in each rank.
_COMPILER_WORDS = re.compile(
    rb"\b(?:compile|_?dynamo|compiler|_?inductor|optim|Fused(?:Adam|Lamb|Lion)|DeepSpeedCPU\w+|"
    rb"DistributedDataParallel|DDP|FSDP\w*|FullyShardedDataParallel|fully_shard|fsdp|pipelining|"
    rb"[Tt]iled\w*|linear_cross_entropy|torch_xla|accelerate|diffusers|ignite|lightning|peft|pytorch_lightning|"
    rb"sentence_transformers|timm|torchtitan|torchtune|torchvision|transformers|trl|unsloth)\b"
)


def find_program(target: str, *, kind: ProgramKind | None) -> tuple[ProgramKind, str]:
    """Decides how the first word is to be understood.

    A file that is a program of another kind (an ELF binary, a script whose `#!` line names no Python) is a command; all
    else is a Python script. A bare name is looked up here, not in PATH: `dsrun evaluate` with a forgotten `.py` must
    not run what happens to be installed under that name.

    Args:
        target: the word; a relative path counts from the working folder.
        kind: kind of program that the user said it is; None means that the file decides.

    Returns:
        the kind, and the target: a command in the working folder gets `./`, or it would be looked up in PATH.
    """
    if kind is not None:
        return kind, target
    if _interpreter(target) is None:
        return "script", target
    return "command", target if os.sep in target else f".{os.sep}{target}"


def start_method(program: Program, asked: StartMethod | None) -> StartMethod:
    """Returns how ranks are made: by fork, but for programs that are not Python, and scripts that set what torch reads
    while it is imported; see `import_variables`.

    Args:
        program: program that every rank is to run.
        asked: start method that the user asked for; None where the user said nothing.

    Raises:
        UsageError: a program that is not Python cannot be forked.
    """
    if program.kind != "command":
        return asked or ("exec" if _read_at_import(program) else "fork")
    if asked == "fork":
        interpreter = _interpreter(program.target)
        what = f"it is {interpreter}, not Python" if interpreter else "it is run as it is, not by Python"
        raise UsageError(
            f"`--start fork` cannot fork {_shown(program.target)}: {what}", hint="leave `--start fork` out"
        )
    return "exec"


def start_warnings(program: Program, asked: StartMethod | None) -> tuple[str, ...]:
    """Says why ranks are not forked although they could be; nothing where the user has said how they start.

    Args:
        program: program that every rank is to run.
        asked: start method that the user asked for; None where the user said nothing.
    """
    late = _read_at_import(program) if asked is None else []
    if not late:
        return ()
    names = dict.fromkeys(setting.name for setting in late)
    where = f"{_shown(program.target)}:{late[0].line}"
    return (
        f"warning: {where}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} set before torch is imported: "
        f"each rank imports torch itself (`--start exec`), and starts later than with `--env {late[0].name}=VALUE`",
    )


def check_program(program: Program, *, verbs: Sequence[str]) -> None:
    """Looks whether what every rank is to run is there.

    Args:
        program: program that the user named; relative paths count from the working folder.
        verbs: names of verbs that the first word may have been meant to be.

    Raises:
        UsageError: it is missing, unreadable or of the wrong kind.
    """
    match program.kind:
        case "script":
            problem = _problem_with_script(program.target, verbs)
        case "module":
            problem = _problem_with_module(program.target)
        case "command":
            problem = _problem_with_command(program.target)
    if problem is not None:
        raise UsageError.of([problem])


def script_text(program: Program) -> bytes:
    """Returns the text of a script; nothing where it is none or cannot be read, which `check_program` tells."""
    path = Path(program.target)
    try:
        return path.read_bytes() if program.kind == "script" and path.is_file() else b""
    except (OSError, ValueError):
        return b""


def names_compiler(program: Program, *, folder: str) -> bool:
    """Tells whether a program probably imports torch's compiler, for which a spawner imports it once for all ranks.

    A script that names nothing of the kind, but imports a module of its own that does, has each rank import it. Of a
    module's text nothing is known here, so it counts as naming it.

    Args:
        program: program that every rank is to run.
        folder: folder in which ranks start; a script's path counts from there.
    """
    if program.kind != "script":
        return program.kind == "module"
    text = script_text(replace(program, target=os.path.join(folder, program.target)))
    return _COMPILER_WORDS.search(text) is not None


def _read_at_import(program: Program) -> list[VariableAssignment]:
    """Returns where a script sets what an import of torch before it would not see."""
    found = settings_before_torch(script_text(program))
    return [setting for setting in found if is_read_at_import(setting.name, setting.value)]


def _problem_with_script(target: str, verbs: Sequence[str]) -> Problem | None:
    path = Path(target)
    if not target:
        return Problem("script: the name is empty", "`dsrun train.py` runs `train.py`; see `dsrun run --help`")
    try:
        if path.is_dir():
            module = ".".join(path.parts)
            runnable = (path / "__main__.py").is_file() and not path.is_absolute()
            return Problem(
                f"script {target}: is a folder; expected a Python file",
                f"`dsrun -m {module}` runs it as a module" if runnable else _close_to(path / "train.py"),
            )
        if not path.exists():
            return Problem(f"script {target}: no such file", _did_you_mean(path, verbs))
        if not path.is_file():
            # A named pipe would be waited for, and could be read by one rank only.
            return Problem(f"script {target}: is no regular file; expected a Python file")
        with path.open("rb"):
            return None
    except (OSError, ValueError) as error:
        return Problem(f"script {_shown(target)}: cannot be read: {_reason(error)}")


def _did_you_mean(path: Path, verbs: Sequence[str]) -> str | None:
    # A whole word of another tool says more than one of ours that looks like it: `prune` is not `run`.
    instead = VERBS_INSTEAD.get(str(path)) if verbs else None
    if len(path.parts) == 1 and not path.suffix and instead is None:
        verb = difflib.get_close_matches(str(path), verbs, n=1)
        if verb:
            return f"did you mean `dsrun {verb[0]}`?"
    files = _close_to(path)
    if files is not None:
        return files
    if instead is not None:
        return f"did you mean `dsrun {instead}`?"
    if shutil.which(str(path)) is not None:
        return f"to run the program of that name, use `dsrun --no-python {path}`"
    return None


def _close_to(path: Path) -> str | None:
    """Names the Python files beside `path` that look most like it."""
    try:
        names = sorted(entry.name for entry in os.scandir(path.parent) if entry.name.endswith(".py"))
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"did you mean {' or '.join(f'`{path.parent / name}`' for name in close)}?" if close else None


def _problem_with_module(target: str) -> Problem | None:
    """Walks down the packages without importing them: a parent's `__init__` may load torch or start threads."""
    if target.endswith(".py") and Path(target).is_file():
        return Problem(f"module {_shown(target)}: is a file; expected `package.module`", "leave `-m` out to run it")
    if not all(part.isidentifier() for part in target.split(".")):
        return Problem(f"module {_shown(target)}: is no module name; expected `package.module`")
    top, *below = target.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    seen = top
    for part in below:
        if spec is None or spec.submodule_search_locations is None:
            break
        seen = f"{seen}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(seen, list(spec.submodule_search_locations))
    if spec is None:
        return Problem(f"module {target}: there is no module `{seen}`", f"searched {os.getcwd()} and the import path")
    if seen != target:
        return Problem(f"module {target}: `{seen}` is a module, not a package")
    locations = spec.submodule_search_locations
    if locations is not None and importlib.machinery.PathFinder.find_spec("__main__", list(locations)) is None:
        return Problem(f"module {target}: is a package without a `__main__`", "name a module inside it")
    return None


def _problem_with_command(target: str) -> Problem | None:
    if shutil.which(target) is not None:
        return None
    if os.sep in target and Path(target).is_file():
        interpreter = _interpreter(target)
        if interpreter is not None:
            return Problem(f"command {_shown(target)}: is {interpreter} and not executable", f"`chmod +x {target}`")
        way_out = f"`chmod +x {target}`; for a Python script leave `--no-python` out"
        return Problem(f"command {_shown(target)}: is not executable", way_out)
    return Problem(f"command {_shown(target)}: there is no such program", "give its path, or add its folder to PATH")


def _interpreter(target: str) -> str | None:
    """Tells what a file is that is no Python script: `a binary`, `a bash script`; None for everything else."""
    if target.endswith((".py", ".pyw", ".pyz")):
        return None
    try:
        if not Path(target).is_file():
            # Opening a named pipe would wait.
            return None
        with open(target, "rb") as file:
            first_line = file.readline(256)
    except (OSError, ValueError):
        return None
    if first_line.startswith(b"\x7fELF"):
        return "a binary"
    if not first_line.startswith(b"#!"):
        return None
    # `#!/usr/bin/env -S A=1 python3 -u`: the first word that is neither env, an option of it, nor a variable.
    words = (os.path.basename(word) for word in os.fsdecode(first_line[2:]).split())
    name = next((word for word in words if word != "env" and not word.startswith("-") and "=" not in word), "")
    return None if not name or name.startswith(("python", "pypy")) else f"a {_shown(name)} script"


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text) or "``"


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
