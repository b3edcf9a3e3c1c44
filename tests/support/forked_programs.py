"""Programs that each have a process of their own and end as an interpreter does, forked from one that has torch.

For tests of what happens at a program's end, which is why multiprocessing's children will not do: those leave without
exit handlers. To import torch is 1.3 s of a core, and all else that such a program does is less than 0.1 s. Ranks of a
job are forked in the same way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from support.cli import clean_environment


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended and what it said."""

    code: int
    out: str
    err: str


#: Reads the programs, forks for one after the other, and tells how each ended. In a fork it goes on as the program.
_SERVER = """
import gc, json, os, sys, tempfile
import importlib, torch.distributed
words, modules = json.load(sys.stdin)
for module in modules:
    importlib.import_module(module)
gc.collect()
gc.freeze()
ends = []
for source in words:
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    pid = os.fork()
    if pid == 0:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        out.close()
        err.close()
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out.seek(0)
    err.seek(0)
    ends.append((code, out.read().decode(), err.read().decode()))
else:
    print(json.dumps(ends), flush=True)
    os._exit(0)
exec(compile(source, "program", "exec"), {"__name__": "__main__"})
"""


def with_words(source: str, *words: str) -> str:
    """Returns a program that finds words in `sys.argv`, as those behind `python -c SOURCE` are found there."""
    return f"import sys\nsys.argv[:] = {['-c', *words]!r}\n{source}"


def run_programs(sources: Sequence[str], *, modules: Sequence[str] = (), timeout_s: float = 100) -> list[Ended]:
    """Runs programs, one after the other, and returns how each ended.

    Args:
        sources: texts of the programs, as for `python -c`.
        modules: names of what is imported before the first one, beside torch.
        timeout_s: bound on all of them.

    Raises:
        subprocess.SubprocessError: they did not end in time.
    """
    done = subprocess.run(
        [sys.executable, "-c", _SERVER],
        input=json.dumps([list(sources), list(modules)]),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    return [Ended(*end) for end in json.loads(done.stdout)]
