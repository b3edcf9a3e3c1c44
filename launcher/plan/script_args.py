"""The words after the script: which are the script's, and which config they name. Pure; no file is opened here.

Everything after the script is the script's, untouched, with one exception:

    dsrun train.py --config ds.json --lr 3      the config is dsrun's wherever it stands before a `--`; it is taken out
    dsrun train.py a -- --config mine.yaml      after a `--` all words are the script's, and the `--` too
    dsrun -- train.py --config mine.yaml        a `--` before the script ends dsrun's own options, this one as well
    dsrun train.py --deepspeed_config ds.json   is left where it is, for scripts written for DeepSpeed, and read too
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dsrun.errors import Problem, UsageError

CONFIG_FLAG = "--config"
DEEPSPEED_CONFIG_FLAG = "--deepspeed_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptWords:
    """What the words after the script say.

    Attributes:
        args: the words the script gets, byte for byte.
        config: value of `--config`, if given.
        deepspeed_config: value of `--deepspeed_config`, if given; also still among `args`.
    """

    args: tuple[str, ...]
    config: str | None
    deepspeed_config: str | None


def split_script_words(words: Sequence[str], *, all_are_scripts: bool = False) -> ScriptWords:
    """Takes dsrun's own config out of the words after the script.

    Args:
        words: everything after the script, as the user typed it.
        all_are_scripts: a `--` stands before the script.

    Raises:
        UsageError: a flag has no value, or is given twice with different values.
    """
    ours, theirs = ((), words) if all_are_scripts else _cut_at_double_dash(words)
    args: list[str] = []
    problems: list[Problem] = []
    found: dict[str, list[str]] = {CONFIG_FLAG: [], DEEPSPEED_CONFIG_FLAG: []}
    rest = iter(ours)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in found:
            args.append(word)
            continue
        kept = [word]
        if not equals:
            following = next(rest, None)
            value = following or ""
            kept += [] if following is None else [following]
        if value:
            found[flag].append(value)
        else:
            problems.append(_no_value(flag))
        if flag == DEEPSPEED_CONFIG_FLAG:
            args += kept
    problems += [
        Problem(f"`{flag}` names {len(set(values))} files: {', '.join(dict.fromkeys(values))}", f"give `{flag}` once")
        for flag, values in found.items()
        if len(set(values)) > 1
    ]
    if problems:
        raise UsageError.of(problems)
    return ScriptWords(
        args=(*args, *theirs),
        config=next(iter(found[CONFIG_FLAG]), None),
        deepspeed_config=next(iter(found[DEEPSPEED_CONFIG_FLAG]), None),
    )


def misplaced_options(words: Sequence[str], complaint: Sequence[str], *, options: Collection[str]) -> list[str]:
    """Finds options of dsrun that stand after the script and that the script refused by name.

    Args:
        words: everything after the script, as the user typed it.
        complaint: the last lines of a rank that ended with code 2, as argument parsers do.
        options: those of dsrun.

    Returns:
        the options, in the order of `words`. One that the script lists in its usage is the script's own.
    """
    ours, _ = _cut_at_double_dash(words)
    *usage, refusal = [set(re.findall(r"(?<![\w-])--?\w[\w-]*", line)) for line in complaint if line.strip()] or [set()]
    typed = dict.fromkeys(word.partition("=")[0] for word in ours)
    return [word for word in typed if word in options and word in refusal and not any(word in line for line in usage)]


def _cut_at_double_dash(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    if "--" not in words:
        return words, ()
    at = list(words).index("--")
    return words[:at], words[at:]


def _no_value(flag: str) -> Problem:
    return Problem(
        f"`{flag}` after the script names no file",
        f"write `{flag} FILE`; if it is meant for the script alone, put `--` before the script",
    )
