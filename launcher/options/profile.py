"""The value of `--profile`: its words become a request that ranks read. Profiles nothing."""

from __future__ import annotations

import re

import click

from dsrun.contract.profile_request import ProfileRequest
from dsrun.errors import UsageError

from ..console.rank_set import parse_rank_set

_FORM = "steps=A:B[,ranks=0,3-5|all][,memory][,stacks][,shapes]"
_FLAGS = ("memory", "stacks", "shapes")
#: More ranks than any job has, while it is not known how many this one has.
_ANY_RANKS = 1_000_000


def parse_profile(text: str) -> ProfileRequest:
    """Reads `steps=10:13`, `steps=4,ranks=0,3-5`, `steps=10:13,ranks=all,memory,stacks,shapes`."""
    words = _words(text)
    unknown = [word for word in words if word not in ("steps", "ranks", *_FLAGS)]
    if unknown:
        raise click.BadParameter(f"expected {_FORM}, got `{unknown[0]}` in `{text}`")
    if "steps" not in words:
        raise click.BadParameter(f"`{text}` names no steps; expected {_FORM}")
    first, last = _steps(words["steps"])
    ranks = words.get("ranks", "0")
    return ProfileRequest(
        first=first,
        last=last,
        ranks=None if ranks == "all" else _ranks(ranks, text),
        memory="memory" in words,
        stacks="stacks" in words,
        shapes="shapes" in words,
    )


def check_profiled_ranks(profile: ProfileRequest, world_size: int) -> None:
    """Refuses ranks that the job does not have.

    Args:
        profile: request of the user.
        world_size: ranks of the job.

    Raises:
        UsageError: there is no such rank.
    """
    missing = [rank for rank in profile.ranks or () if rank >= world_size]
    if missing:
        there = "rank 0 only" if world_size == 1 else f"ranks 0-{world_size - 1}"
        raise UsageError(
            f"`--profile`: there is no rank {missing[0]}; the job has {there}",
            hint="`ranks=all` profiles all that there are",
        )


def _words(text: str) -> dict[str, str]:
    """Returns the values by their names; a part that is all numbers goes on with the ranks before it."""
    words: dict[str, str] = {}
    name = ""
    for part in text.split(","):
        if name == "ranks" and re.fullmatch(r"\s*[0-9]+(-[0-9]+)?\s*", part):
            words["ranks"] += f",{part}"
            continue
        name, equals, value = part.strip().partition("=")
        if name in words:
            raise click.BadParameter(f"`{text}` has `{name}` twice")
        if bool(equals) != (name in ("steps", "ranks")):
            raise click.BadParameter(f"expected {_FORM}, got `{part.strip()}` in `{text}`")
        words[name] = value
    return words


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None:
        raise click.BadParameter(f"expected steps like `10:13`, got `steps={text}`")
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1:
        raise click.BadParameter(f"`steps={text}`: steps count from 1")
    if last < first:
        raise click.BadParameter(f"`steps={text}` ends before it begins; write `steps={last}:{first}`")
    return first, last


def _ranks(text: str, value: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(parse_rank_set(text, _ANY_RANKS)))
    except UsageError as error:
        raise click.BadParameter(f"expected ranks like `ranks=0,3-5` or `ranks=all` in `{value}`") from error
