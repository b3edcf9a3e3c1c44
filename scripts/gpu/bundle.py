"""The wheels that a machine without network needs: downloaded on one with network, used on the other.

    bash scripts/gpu_check --bundle DIR                        here: download, check, say the size
    bash scripts/gpu_check --bundle DIR --out results.json     there: use them for this run, and leave nothing behind

torch is not in the bundle, for it is what makes the other machine a GPU machine. DeepSpeed is: it comes as source, of
which a wheel is made without compiling; where that fails, the parts that measure it are not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .packages import choose, dependencies, installed_version, name_of, tools_of_tests, wheels_in

#: What the folder may weigh, so that it can travel with a working tree.
LIMIT_BYTES = 64 << 20
#: Tags of files that a machine with glibc 2.28 or newer loads: pip takes no older one by itself.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)
#: What the machine itself brings.
_BROUGHT = "torch"


def download(folder: Path, *, python: str = "3.12", platforms: Sequence[str] = PLATFORMS) -> int:
    """Fills a folder with wheels, and says on stderr what they weigh and what is missing.

    Args:
        folder: folder for the wheels, made if it is missing; wheels that are already in it are taken into account.
        python: version of the other machine's Python, e.g. 3.12.
        platforms: tags of wheels that it loads.

    Returns:
        0; 1 if something that dsrun needs is missing, or the folder is too heavy to travel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    roots = [one for one in (*dependencies(), *tools_of_tests()) if name_of(one) != _BROUGHT]
    peers = _build_deepspeed(folder)
    words = ["download", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in platforms:
        words += ["--platform", platform]
    failure = _pip(*words, "--dest", str(folder), *roots, *peers)
    if failure is not None and peers:
        _say(f"note: without DeepSpeed's own needs, for with them pip says: {failure}")
        failure = _pip(*words, "--dest", str(folder), *roots)
    if failure is not None:
        _say(f"error: pip could not download what dsrun needs: {failure}")
        return 1
    return judged(folder, roots, python=python)


def use(folder: Path, site: Path) -> None:
    """Installs what this interpreter lacks, without network, and lets the parts of this run find it.

    A package that is here in a version that will do is not installed a second time, so a newer numpy or torch of the
    machine is never hidden: what is installed comes first on the path, and is missing elsewhere or too old there.

    Args:
        folder: folder of wheels.
        site: an empty folder.

    Raises:
        SystemExit: there are no wheels in the folder, or pip failed.
    """
    wheels = wheels_in(folder)
    if not wheels:
        raise SystemExit(f"error: there are no wheels in {folder}\nhint: without --out, --bundle {folder} fills it")
    roots = [*dependencies(), *tools_of_tests(), *(["deepspeed"] if "deepspeed" in wheels else [])]
    chosen, unmet = choose(roots, wheels, installed=installed_version)
    if chosen:
        words = ("--no-index", "--no-deps", "--no-compile", "--target", str(site))
        failure = _pip("install", *words, *(str(wheel.path) for wheel in chosen))
        if failure is not None:
            here = f"{sys.version_info.major}.{sys.version_info.minor}"
            hint = f"hint: this is Python {here}; the bundle must be made with --bundle-python {here}"
            raise SystemExit(f"error: pip could not install from {folder}: {failure}\n{hint}")
    names = ", ".join(f"{wheel.name} {wheel.version}" for wheel in chosen)
    _say(f"bundle: {names or 'nothing that is not here already'}")
    if unmet:
        _say(f"note: neither here nor in {folder}: {', '.join(unmet)}")
    sys.path.append(str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(site))))


def _build_deepspeed(folder: Path) -> list[str]:
    """Makes DeepSpeed's wheel if it is not in the folder; returns its needs beside torch, none without a wheel."""
    if "deepspeed" not in wheels_in(folder):
        # Its setup.py imports torch, hence this interpreter's packages; nothing is compiled.
        failure = _pip(
            *("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), "deepspeed"),
            environment={"DS_BUILD_OPS": "0"},
        )
        if failure is not None:
            _say(f"note: without DeepSpeed, of which no wheel could be made here: {failure}")
            return []
    wheel = wheels_in(folder)["deepspeed"]
    return [one for one in wheel.needs if "extra ==" not in one and name_of(one) != _BROUGHT]


def judged(folder: Path, roots: Sequence[str], *, python: str, limit_bytes: int = LIMIT_BYTES) -> int:
    """Says on stderr what a folder of wheels weighs, and what is missing in it.

    Args:
        folder: folder of wheels.
        roots: requirements of a machine that has torch and nothing else.
        python: version of its Python.
        limit_bytes: largest size of the folder in bytes.

    Returns:
        0; 1 if it will not do.
    """
    wheels = wheels_in(folder)
    target = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
    }
    # An interpreter that has nothing but torch, in a version that will do for all.
    brought = {_BROUGHT: "9999"}
    _, unmet = choose(roots, wheels, installed=brought.get, environment=target)
    _, unmet_of_peer = choose(["deepspeed"], wheels, installed=brought.get, environment=target)
    weight = sum(wheel.path.stat().st_size for wheel in wheels.values())
    _say(f"{folder}: {len(wheels)} wheels, {weight / (1 << 20):.1f} MiB of {limit_bytes >> 20}, for Python {python}")
    _say(f"not in it: {_BROUGHT}, which the GPU machine has")
    if unmet_of_peer:
        _say(f"note: parts that measure DeepSpeed will not run: no wheel for {', '.join(unmet_of_peer)}")
    if unmet:
        _say(f"error: no wheel for {', '.join(unmet)}")
    if weight > limit_bytes:
        _say("error: the folder is too heavy to travel\nhint: begin with an empty one, older versions may lie in it")
    return 1 if unmet or weight > limit_bytes else 0


def _pip(*words: str, environment: dict[str, str] | None = None) -> str | None:
    """Runs pip; returns the last line of what it said if it failed."""
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words)
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if run.returncode == 0:
        return None
    lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines or [f"exit code {run.returncode}"]
    return errors[-1].strip()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
