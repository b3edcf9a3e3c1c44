"""Verbs of click whose options end where a script begins, and what becomes of a `--` there. Knows no option's meaning.

A `--` behind the script is a word of the script. One before it ends the verb's own options: click takes it out, as
any program's parser does, and here stands that it was there.
"""

from __future__ import annotations

from collections.abc import Collection

import click

from .sectioned_help import SectionedCommand

_ENDED = "dsrun.launcher.options_ended"


class ScriptCommand(SectionedCommand):
    """A command whose last argument is called `words`: the script and what follows it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the options, and notes whether a `--` ended them, or one of them has the same effect."""
        typed = list(args)
        rest = super().parse_args(ctx, args)
        options = typed[: len(typed) - len(ctx.params.get("words") or ())]
        # A script of another program's may have a `--config` of its own.
        ctx.meta[_ENDED] = options[-1:] == ["--"] or bool(ctx.params.get("as_deepspeed"))
        return rest


def all_are_scripts(ctx: click.Context) -> bool:
    """Whether no word behind the script is dsrun's: a `--` stood before it, or it was written for DeepSpeed.

    Args:
        ctx: click's context of a `ScriptCommand`.
    """
    return bool(ctx.meta.get(_ENDED))


def own_options_first(args: Collection[str], own: Collection[str]) -> list[str]:
    """Returns the words with a verb's own options before a `--`, and behind it all words of another verb's command.

    click would take out the first `--`, although it is the other command's.

    Args:
        args: words as they were typed; own options may stand among the other command's options, but not after its first
            argument.
        own: flags of the verb.
    """
    words, taken = list(args), list[str]()
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        if words[at] in own:
            taken.append(words.pop(at))
        else:
            at += 1
    return [*taken, "--", *words]
