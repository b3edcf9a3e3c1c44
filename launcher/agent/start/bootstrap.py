"""Runs the user's script or module in a rank as plain `python` would, and leaves word of why it failed.

Does not start processes and knows nothing of the launch but the error file. Two ways in: `main` in a fresh interpreter
(`--start exec`), and `enter_forked_rank` then `run` in a fork of the spawner (`--start fork`).

What is the same as with plain python: `__main__`, `sys.argv`, `sys.path[0]`, `sys.excepthook`, exit codes of
SystemExit, atexit, threads, death by SIGINT after KeyboardInterrupt. What is better: a `DsrunError` is left to the
launcher, which shows its `error:` and `hint:` lines once, tracebacks begin at the user's code, and a crash in native
code shows the Python stack. Asked by the agent, a rank writes the stacks of all its threads (`stack_answers`).
After a program that ended well, process groups are let go of in time (`gloo_exit`).
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dsrun.contract.environment import (
    ERROR_FILE_ENV,
    STACKS_ENV,
    has_made_engine,
    is_first_rank,
    stands_for_deepspeed,
    take_local_rank_word,
)
from dsrun.contract.error_file import write_error_file
from dsrun.contract.heartbeats import StartState, process_writer
from dsrun.errors import DsrunError, InputError

from .first_import import hide_torch, watch_import
from .gloo_exit import GlooExit
from .rank_stdin import take_stdin
from .stack_answers import answer_with_stacks


def main() -> None:
    """Entry of a fresh interpreter; argv: kind, target, the program's own arguments."""
    take_stdin()
    kind, target, *arguments = sys.argv[1:]
    rank_pid, heartbeat = os.getpid(), process_writer()

    def tell_import(begins: bool) -> None:
        # A fork of the program's has the same slot: killed in its import, it would leave its word there.
        if os.getpid() == rank_pid:
            heartbeat.tell_start(StartState.IMPORTS_TORCH if begins else StartState.RUNS)

    watch_import(tell_import)
    run(kind, target, arguments)


def enter_forked_rank(environment: Mapping[str, str], *, imported_in: Mapping[str, str] | None = None) -> None:
    """Makes a fork of the spawner look like an interpreter that was started in `environment`.

    Args:
        environment: replaces the whole environment.
        imported_in: the spawner's environment before it imported torch; None if it did not.
    """
    before = os.environ.copy()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As every interpreter does at its start: a write to a closed pipe is an exception, not a death.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    take_stdin()
    _renew_outputs()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # Seeded from the system at import, so all forks would draw the same numbers; fresh interpreters do not.
        numpy.random.seed()
    if "triton" in sys.modules:
        # The spawner froze what it imported, so the interpreter's end would not free it, and nanobind, which binds
        # Triton since 3.9, writes a line for each type that is left. The first handler is the last to run. It costs a
        # second of the end, as under plain python, so it is not done where Triton is not loaded.
        atexit.register(gc.unfreeze)
    if imported_in is not None:
        left = {name: value for name, value in before.items() if imported_in.get(name) != value}
        hide_torch(seen=imported_in, left=left)


def _renew_outputs() -> None:
    """New objects on 1 and 2, unbuffered as with `python -u`: what the parent had buffered is not written again."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    for name, descriptor, on_error in (("stdout", 1, errors or "strict"), ("stderr", 2, "backslashreplace")):
        # Unbuffered binary layer below: it is what `-u` has, and a killed rank loses nothing.
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding=encoding, errors=on_error, write_through=True)  # pyright: ignore[reportArgumentType]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Runs the program to its end; the process should exit right after, by returning or by what is raised.

    Args:
        kind: `script` or `module`.
        target: path of the script, or the module's name.
        arguments: `sys.argv[1:]`.

    Raises:
        SystemExit: as the program asked, 1 after an uncaught exception, or a `DsrunError`'s own code.
        KeyboardInterrupt: uncaught in the program; not to be shown, only the death by SIGINT is left to do.
    """
    # Sixty-four ranks that crash must not write sixty-four stacks of other threads: `all_threads` stays off.
    faulthandler.enable(all_threads=False)
    if (stacks := os.environ.get(STACKS_ENV)) is not None:
        answer_with_stacks(Path(stacks))
    process_writer().tell_start(StartState.RUNS)
    gloo_exit = GlooExit()
    arguments = [*take_local_rank_word(os.environ), *arguments]
    try:
        if kind == "module":
            _run_module(target, arguments)
        else:
            _run_script(target, arguments)
        _note_no_engine(target)
        gloo_exit.program_ended()
    except SystemExit as end:
        if end.code in (None, 0):
            _note_no_engine(target)
            gloo_exit.program_ended()
        raise
    except DsrunError as error:
        fail(error, error.exit_code)
    except KeyboardInterrupt:
        # The user wants the job to end: a stack from each of its ranks says nothing that they do not know. The
        # interpreter kills itself with SIGINT only if this reaches the top.
        sys.excepthook = _show_nothing
        raise
    except BaseException as error:
        # Written first: peers die of the broken connection soon, and the time says who was first.
        _leave_word(error)
        _show(error)
        sys.exit(1)


def fail(error: DsrunError, exit_code: int) -> None:
    """Ends the rank for a mistake that needs no traceback.

    Args:
        error: left in the error file, from where the launcher shows it once for all ranks that made it; shown on
            stderr as its `error:` and `hint:` lines where it cannot be left.
        exit_code: exit code of the process.

    Raises:
        SystemExit: always.
    """
    if not _leave_word(error, exit_code=exit_code):
        print(error.render(), file=sys.stderr, flush=True)
    sys.exit(exit_code)


def _run_script(path: str, arguments: Sequence[str]) -> None:
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        # A folder or archive with __main__.py; runpy puts it first on the path itself.
        sys.argv = [path, *arguments]
        _stand_for_deepspeed(position=0)
        runpy.run_path(path, run_name="__main__")
        return
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"script: cannot read {path!r}: {error.strerror}") from error
    _set_path_start(os.path.dirname(os.path.realpath(path)))
    sys.argv = [path, *arguments]
    module = _new_main()
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    # Not runpy.run_path: it takes `__main__` away again when the script returns, and atexit handlers, threads that
    # still run and pickling need it until the process ends.
    exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str, arguments: Sequence[str]) -> None:
    _set_path_start(os.getcwd())
    sys.argv = ["-m", *arguments]
    _new_main()
    # What `python -m` itself calls. The public run_module takes `__main__` away again, see _run_script.
    runpy._run_module_as_main(name)  # pyright: ignore[reportAttributeAccessIssue]


def _set_path_start(folder: str) -> None:
    is_safe = getattr(sys.flags, "safe_path", False)
    if not is_safe:
        sys.path.insert(0, folder)
    _stand_for_deepspeed(position=0 if is_safe else 1)


def _stand_for_deepspeed(*, position: int) -> None:
    """Has the program's `import deepspeed` give dsrun where that was asked for, see `dsrun.as_deepspeed`."""
    if stands_for_deepspeed():
        from dsrun.as_deepspeed.search_path import install

        install(position=position)


def _note_no_engine(program: str) -> None:
    """Says of a program that ended well and is written for DeepSpeed that it has trained without, or not at all.

    What the processes that it has started did is not known here: where most of the work was theirs, nothing is said.
    DeepSpeed's own tools, `-m deepspeed.checkpoint.ds_to_universal` and the like, train nothing.
    """
    is_tool = program.startswith("deepspeed.")
    if is_tool or not stands_for_deepspeed() or has_made_engine() or not is_first_rank():
        return
    spent = os.times()
    if spent.children_user + spent.children_system > spent.user + spent.system:
        return
    print(
        "dsrun: warning: the program has ended and made no engine: what it trained, it trained without DeepSpeed's "
        "config; is `--deepspeed FILE` or a DeepSpeedPlugin missing, or ACCELERATE_USE_CPU or Accelerator(cpu=True) "
        "there?",
        file=sys.stderr,
        flush=True,
    )


def _new_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def _leave_word(error: BaseException, *, exit_code: int = 1) -> bool:
    path = os.environ.get(ERROR_FILE_ENV)
    if path is None:
        return False
    try:
        error = error.with_traceback(_user_frames(error.__traceback__))
        return write_error_file(Path(path), error, exit_code=exit_code)
    except OSError as reason:
        # A full or read-only disk must not hide the error itself, which is shown next.
        print(f"dsrun: cannot write {path}: {reason.strerror}", file=sys.stderr, flush=True)
        return False


def _show(error: BaseException) -> None:
    # The hook shows the traceback that the exception itself holds, whatever its third argument is.
    error = error.with_traceback(_user_frames(error.__traceback__))
    sys.excepthook(type(error), error, error.__traceback__)


def _show_nothing(_type: type[BaseException], _error: BaseException, _stack: TracebackType | None) -> None:
    pass


def _user_frames(stack: TracebackType | None) -> TracebackType | None:
    """Drops our own frames and runpy's from the top; what is left begins in the user's code."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while stack is not None and stack.tb_frame.f_code.co_filename in ours:
        stack = stack.tb_next
    return stack
