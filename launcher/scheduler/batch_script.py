"""The script that Slurm runs for a job of dsrun, and the words of `sbatch` in it. Text only: nothing is submitted here.

The script ends in `exec dsrun`, so that dsrun is the job's script itself: its exit code is the job's, and signals that
Slurm sends to the script (`--signal=B:USR1@60`, `scancel --batch`) reach it and no shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from dsrun.errors import Problem, UsageError

#: Slurm puts the job's id in place of `%j`.
OUTPUT = "slurm-%j.out"
_TIMES = ("--time", "--time-min")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_UNIT_TIME = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([smhd])")
#: Minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on, as sbatch takes them.
_SLURM_TIME = re.compile(r"[0-9]+(?::[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(?::[0-9]{1,2}){0,2}|(?i:infinite|unlimited)")
_TASKS = ("--ntasks", "-n", "--ntasks-per-node", "--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core")


def slurm_time(text: str) -> str | None:
    """Returns a time as sbatch takes it: `2h` -> `0-02:00:00`; a bare number is minutes, as Slurm's users know it.

    Args:
        text: `30s`, `2h`, `1.5d` or one of Slurm's own forms.

    Returns:
        None where it is no time above 0.
    """
    if (match := _UNIT_TIME.fullmatch(text)) is not None:
        seconds = round(float(match[1]) * _UNITS[match[2]])
        minutes, left_s = divmod(seconds, 60)
        hours, left_min = divmod(minutes, 60)
        days, left_h = divmod(hours, 24)
        return f"{days}-{left_h:02}:{left_min:02}:{left_s:02}" if seconds else None
    return text if _SLURM_TIME.fullmatch(text) is not None and re.search(r"[1-9]|[a-zA-Z]", text) else None


def sbatch_words(words: Sequence[str]) -> list[str]:
    """Returns the words for sbatch with times in its own form.

    Raises:
        UsageError: a time is none, a word cannot stand in a script, or an option would take the script's place.
    """
    problems: list[Problem] = []
    done: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") and (not done or (done[-1].startswith("--") and "=" in done[-1])):
            # Behind another option it may be the value of that one.
            problems.append(
                Problem(f"`{word}` is no option of sbatch", "words of the script stand before the last `--`")
            )
        name, equals, value = word.partition("=")
        if word.startswith("-t") and len(word) > 2:
            name, equals, value = "--time", "=", word[2:].removeprefix("=")
        name = "--time" if name == "-t" else name
        if "\n" in word or "\r" in word:
            problems.append(Problem(f"sbatch's {word!r} holds a line break", "its options stand on a line each"))
        elif name == "--wrap":
            problems.append(Problem("`--wrap` makes a script of its own", "leave it out: dsrun writes the script"))
        elif name in _TIMES:
            value = value if equals else next(rest, "")
            time = slurm_time(value)
            if time is None:
                problems.append(
                    Problem(f"`{name}` is {value!r}; expected a time", "write `30m`, `2h`, `1d` or `1-12:00:00`")
                )
            done.append(f"{name}={time}")
        else:
            done.append(word)
    if problems:
        raise UsageError.of(problems)
    return done


def batch_script(command: Sequence[str], options: Sequence[str], *, script: str, cwd: str) -> str:
    """Returns the script for sbatch.

    Args:
        command: words of the command, of which every one arrives as it is.
        options: words for sbatch, of `sbatch_words`; they overrule dsrun's own.
        script: the training script, which the job is called after.
        cwd: absolute path of the folder to run in.
    """
    own = [f"--job-name={PurePath(script).stem or 'dsrun'}", f"--chdir={cwd}", f"--output={OUTPUT}"]
    # A job that Slurm starts again goes on in the same file.
    own.append("--open-mode=append")
    if not any(_is(word, name) for word in options for name in _TASKS):
        # dsrun starts the ranks of a node: it needs a place there, once.
        own.append("--ntasks-per-node=1")
    lines = [_directive([word]) for word in own] + [_directive(words) for words in _by_option(options)]
    return "\n".join(["#!/bin/sh", *lines, "", f"exec {shlex.join(command)}", ""])


def output_of(options: Sequence[str], *, job_id: str, cwd: str) -> str | None:
    """Returns the file that the job's output goes to; None where a pattern stands in it that only Slurm fills in."""
    name = OUTPUT
    rest = iter(options)
    for word in rest:
        if word in ("-o", "--output"):
            name = next(rest, name)
        elif _is(word, "--output") or _is(word, "-o"):
            name = word.partition("=")[2] if word.startswith("--") else word[2:]
    name = name.replace("%j", job_id)
    return None if "%" in name else str(PurePath(cwd, name))


def _is(word: str, name: str) -> bool:
    """Whether a word is the option, with or without its value."""
    if name.startswith("--"):
        return word.partition("=")[0] == name
    return word.startswith(name) and not word.startswith("--")


def _by_option(words: Sequence[str]) -> list[list[str]]:
    """Puts each option together with the words behind it."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def _directive(words: Sequence[str]) -> str:
    return f"#SBATCH {' '.join(map(_quoted, words))}"


def _quoted(word: str) -> str:
    """Quotes a word for sbatch, which knows both quotes and the backslash, and takes `#` for a comment."""
    if re.fullmatch(r"[A-Za-z0-9_%+=:,./@^-]+", word) is not None:
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
