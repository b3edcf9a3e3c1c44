"""Builds the compiled pass of Adam, never in training: `python -m dsrun.runtime.offload.step.build_pass`.

What is built is kept for this source, these flags and this kind of processor, so that hosts that share a home folder do
not take each other's. Nothing of torch is needed to build; loading it and proving its bits is compiled_adam's.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsrun.errors import DsrunError, InputError
from dsrun.files.private import make_private_folder

SOURCE = Path(__file__).resolve().with_name("adam_pass.cpp")
#: Instructions of this processor, and every rounding as it is written.
_FLAGS = ("-std=c++14", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_SHARED = ("-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_BUILD_S = 120.0


def built_pass(folder: Path | None = None) -> Path | None:
    """Returns the library that was built on a machine like this one, None where there is none.

    Args:
        folder: folder in which builds are kept; None for the user's cache.
    """
    path = _place(folder)
    return path if path.is_file() else None


def build_pass(folder: Path | None = None, *, compiler: str | None = None) -> Path:
    """Compiles the pass and returns the library; whoever builds at the same moment finds either one whole.

    Args:
        folder: folder in which builds are kept; None for the user's cache.
        compiler: C++ compiler; None for $CXX, or the first of c++, g++ and clang++ that is there.

    Raises:
        InputError: there is no compiler.
        DsrunError: it fails.
    """
    names = [compiler] if compiler else [*filter(None, [os.environ.get("CXX")]), *_COMPILERS]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise InputError(
            f"no C++ compiler among {', '.join(names)}",
            hint="install one (apt install g++) or name it in CXX; without it the step runs through torch, same bits",
        )
    path = _place(folder)
    make_private_folder(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        new = Path(beside) / path.name
        command = [found, *_FLAGS, *_SHARED, str(SOURCE), "-o", str(new)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_BUILD_S, check=False)
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise DsrunError(f"{' '.join(command)} exited with {done.returncode}:\n{said}")
        os.replace(new, path)
    return path


def _place(folder: Path | None) -> Path:
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "dsrun"
    told = [SOURCE.read_text(), *_FLAGS, platform.machine(), _instructions()]
    return folder / f"adam_pass-{hashlib.sha256(chr(0).join(told).encode()).hexdigest()[:16]}.so"


def _instructions() -> str:
    """Returns what the processor can do, as Linux tells it; elsewhere its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def main(words: Sequence[str] | None = None) -> int:
    """Builds, proves and says where it is; with --remove, removes it.

    Args:
        words: words of the command line; None for the process's own.

    Returns:
        exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m dsrun.runtime.offload.step.build_pass", description=__doc__)
    parser.add_argument("--compiler", help="of C++; else $CXX, c++, g++ or clang++")
    parser.add_argument("--remove", action="store_true", help="remove what was built for this kind of machine")
    args = parser.parse_args(words)
    path = built_pass()
    if args.remove:
        if path is not None:
            path.unlink()
        print("nothing was built" if path is None else f"removed {path}")
        return 0
    from .compiled_adam import load_pass

    try:
        path = build_pass(compiler=args.compiler)
        load_pass(path)
    except DsrunError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(f"{path}: gives the bits of torch's fused kernel; `offload_optimizer` on this kind of machine uses it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
