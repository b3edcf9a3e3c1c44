"""What a job depends on beside its command: versions, GPUs, the state of the code, variables. And what changed since.

Reads only; what cannot be told is None. Values of variables that speak of a secret are masked.

[Note: names of variables] A script may read any variable of the shell, and only of those that libraries read do we know
that their values tell something and are no secret. Of all others the names alone are recorded: enough to say which of
them is gone. Not even a digest of a value: a short value can be guessed from it. See decision 0053.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths

from ..machine.software.versions import telling_variables
from .record import write_json

#: Raised whenever a field changes its meaning or goes away; new fields do not raise it.
SCHEMA_VERSION = 1

#: For git to answer, in a working tree of any size and on any file system.
_GIT_PATIENCE_S = 5.0
_SHOWN_DIGITS = 16
_SHOWN_CHARS = 80
#: Variables of a terminal, a login or a scheduler's job: another one has others, and a script goes by none of them.
_SESSION_NAMES = frozenset(
    {
        *("_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "MAIL", "MOTD_SHOWN", "KRB5CCNAME", "which_declare"),
        *("PS1", "PS2", "PROMPT", "PROMPT_COMMAND", "ZSH", "ZDOTDIR", "INSIDE_EMACS"),
        *("LS_COLORS", "LSCOLORS", "GREP_COLORS", "CLICOLOR", "COLORFGBG", "NO_COLOR"),
        *("EDITOR", "VISUAL", "BROWSER", "PAGER", "LESS", "LESSOPEN", "LESSCLOSE", "GIT_PAGER", "GIT_ASKPASS"),
        *("TERM", "COLORTERM", "COLUMNS", "LINES", "WINDOW", "STY", "TMUX", "TMUX_PANE", "ZELLIJ"),
        *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "XMODIFIERS", "WINDOWID", "DBUS_SESSION_BUS_ADDRESS"),
        *("DESKTOP_SESSION", "GDMSESSION", "SESSION_MANAGER", "IM_CONFIG_PHASE", "CLUTTER_IM_MODULE"),
        *("INVOCATION_ID", "JOURNAL_STREAM", "MANAGERPID", "SYSTEMD_EXEC_PID"),
    }
)
_SESSION_PREFIXES = (
    *("SSH_", "GPG_", "XDG_", "LC_", "HIST", "SUDO_", "BASH_FUNC_", "SELINUX_", "MEMORY_PRESSURE_"),
    *("TERM_", "VTE_", "VSCODE_", "ALACRITTY_", "KITTY_", "WEZTERM_", "ITERM_", "TERMINATOR_", "TMUX_", "ZELLIJ_"),
    *("WT_", "WSL", "GNOME_", "GTK_", "GIO_", "KDE_", "KONSOLE_", "QT_", "STARSHIP_", "ATUIN_", "P9K_", "DIRENV_"),
    *("SLURM", "PBS_", "LSB_", "PMI", "OMPI_", "PRTE_", "DSRUN_", "TORCHELASTIC_"),
)


def read_facts(*, script: Path | None, folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Looks at what a job is about to depend on.

    Args:
        script: its file, where the job runs one.
        folder: folder where git is asked for the state of the code: the script's folder, or the working folder of a job
            without a script.
        environ: the environment the ranks inherit.

    Returns:
        plain JSON values: `script_digest`, `git`, `environment`, `variables` (see [Note: names of variables]) and
        `probe`.
    """
    # Its modules take tens of milliseconds to load: on the thread of `FactsWriter`, while ranks start.
    from ..machine.read import probe

    return {
        "schema_version": SCHEMA_VERSION,
        "script_digest": None if script is None else digest_of_file(script),
        "git": git_state(folder),
        "environment": telling_variables(environ),
        "variables": _names_of_others(environ),
        "probe": probe(environ=environ).to_json(),
    }


class FactsWriter:
    """Reads the facts and writes them into a job's folder on a thread of its own: the job need not wait for them.

    Args:
        job_folder: folder of the job; the facts are written into it.
        read: function that returns the facts, as `read_facts` does.
    """

    def __init__(self, job_folder: Path, read: Callable[[], dict[str, Any]]) -> None:
        self._path = JobPaths(job_folder).machine
        self._read = read
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def finish(self, patience_s: float) -> str | None:
        """Waits for the end of the writing; returns what went wrong, if anything."""
        self._thread.join(patience_s)
        return f"{self._path.name} is not complete yet" if self._thread.is_alive() else self._problem

    def _write(self) -> None:
        try:
            write_json(self._path, self._read())
        except OSError as error:
            self._problem = f"{self._path.name} is not written: {(error.strerror or str(error)).lower()}"


def memory_sizes(probe: Mapping[str, Any]) -> dict[str, int]:
    """Returns the bytes that a tier has at most, as far as they are known.

    Args:
        probe: report of a host, from `machine.json`.

    Returns:
        `gpu`: memory of the smallest GPU that can be used, for that is full first; `cpu`: memory of the host, or the
        limit of its cgroup if that is less.
    """
    try:
        gpus = [gpu.get("memory_total_bytes") for gpu in probe.get("gpus") or () if gpu.get("usable", True)]
        memory: Mapping[str, Any] = probe.get("memory") or {}
        hosts = [memory.get(name) for name in ("total_bytes", "cgroup_limit_bytes")]
    except (AttributeError, TypeError):
        return {}  # of another form than this version writes
    found = {"gpu": _sizes(gpus), "cpu": _sizes(hosts)}
    return {tier: min(sizes) for tier, sizes in found.items() if sizes}


def _sizes(values: Iterable[object]) -> list[int]:
    return [value for value in values if isinstance(value, int) and 0 < value < 1 << 63]


def digest_of_file(path: Path) -> str | None:
    """Returns the SHA-256 of a file's bytes; None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Asks git for the state of the code.

    Args:
        folder: folder inside the git working tree.

    Returns:
        `commit`, and `dirty`: whether files git knows were changed since; None where git or a commit is missing.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else changed != ""}


def _git(folder: Path, *words: str) -> str | None:
    # Neither writes the index nor runs a program that the working tree names.
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(done.stdout).strip()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Says what changed between two answers of `read_facts`, a line each.

    Args:
        before: facts that were recorded earlier, as `read_facts` returned them; what they do not mention is not
            compared.
        now: facts of the present, as `read_facts` returns them.
    """
    then, today = _sections(before), _sections(now)
    return [
        f"{what}{name}: {_shown(values.get(name))} -> {_shown(today[what].get(name))}"
        for what, values in then.items()
        for name in sorted({*values, *today[what]})
        if values.get(name) != today[what].get(name)
    ]


def gone_variables(before: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Returns the names of variables that were set and are not, but for those whose values `differences` compares.

    Args:
        before: facts that were recorded earlier, as `read_facts` returned them; those of an earlier version name no
            variables.
        environ: environment variables of the present.
    """
    return [name for name in before.get("variables") or () if name not in environ]


def _names_of_others(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of variables that scripts may read, without those whose values are recorded."""
    told = telling_variables(environ)
    return sorted(
        name
        for name in environ
        if name not in told and name not in _SESSION_NAMES and not name.startswith(_SESSION_PREFIXES)
    )


def _sections(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns what is worth comparing, by what it is about."""
    probe_report: dict[str, Any] = facts.get("probe") or {}
    git: dict[str, Any] = facts.get("git") or {}
    sections: dict[str, dict[str, Any]] = {}
    if "versions" in probe_report:
        sections[""] = {**probe_report["versions"], "driver": probe_report.get("driver")}
    if "gpus" in probe_report:
        usable = [gpu for gpu in probe_report["gpus"] if gpu["usable"]]
        sections["GPU "] = {str(gpu["index"]): f"{gpu['name']} ({gpu['uuid']})" for gpu in usable}
    if "cpu" in probe_report and "host" in probe_report:
        cpu, host = probe_report["cpu"], probe_report["host"]
        sections["host "] = {
            "name": host["name"],
            "kernel": host["kernel"],
            "processor": cpu["model"],
            "usable cores": cpu["cores_usable"],
        }
    if "git" in facts:
        dirty = {True: "changed files", False: "no changed files"}
        sections["git "] = {"commit": git.get("commit"), "working tree": dirty.get(git.get("dirty", ""))}
    if "script_digest" in facts:
        digest: str | None = facts["script_digest"]
        sections["script "] = {"digest": None if digest is None else digest[:_SHOWN_DIGITS]}
    if "environment" in facts:
        sections["variable "] = dict(facts["environment"])
    return sections


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
