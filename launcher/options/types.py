"""What the words of options may be: times, counts, paths. Each returns the value or complains as click does."""

from __future__ import annotations

import re
from typing import Literal

import click
from click.shell_completion import CompletionItem

from dsrun.units import parse_bytes

from ..hosts.hostfile import MAX_SLOTS

_SECONDS_IN = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> float:
    """Reads `10`, `10s`, `1.5s`, `2m`, `1h` or `30d`."""
    seconds = parse_seconds_or_none(text)
    if seconds is None:
        raise click.BadParameter(f"expected a time like `10s` or `2m`, got `{text}`")
    return seconds


def parse_duration(text: str) -> float:
    """Reads a time above 0."""
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise click.BadParameter(f"expected a time above 0, got `{text}`")
    return seconds


def parse_seconds_or_none(text: str) -> float | None:
    """Reads the same; None where it is no such time."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)(s|m|h|d|)", text)
    return None if match is None else float(match.group(1)) * _SECONDS_IN[match.group(2)]


def parse_size(text: str) -> int:
    """Reads bytes: `5GB` and `500MB` are decimal as Hugging Face's are, `5GiB` and `500MiB` binary."""
    nbytes = parse_bytes(text)
    if nbytes is None:
        raise click.BadParameter(f"expected a size like `5GB` or `500MiB`, got `{text}`")
    return nbytes


def parse_ranks(text: str) -> int:
    """Reads a number of ranks on one host."""
    if re.fullmatch(r"[0-9]{1,9}", text) is None or not 1 <= int(text) <= MAX_SLOTS:
        raise click.BadParameter(f"expected a number of ranks from 1 to {MAX_SLOTS}, got `{text}`")
    return int(text)


def parse_count(text: str) -> int:
    """Reads a whole number from 0 on."""
    if re.fullmatch(r"[0-9]{1,6}", text) is None:
        raise click.BadParameter(f"expected a whole number, got `{text}`")
    return int(text)


def parse_stdin(text: str) -> int | Literal["none"]:
    """Reads the rank that gets dsrun's own stdin, or `none`."""
    if text == "none":
        return "none"
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise click.BadParameter(f"expected a rank or `none`, got `{text}`")
    return int(text)


def parse_port(text: str) -> int:
    """Reads a port that something can listen on."""
    if re.fullmatch(r"[0-9]{1,5}", text) is None or not 1 <= int(text) <= 65535:
        raise click.BadParameter(f"expected a port from 1 to 65535, got `{text}`")
    return int(text)


def parse_port_or_any(text: str) -> int:
    """Reads a port, or 0 for any that is free."""
    return 0 if text == "0" else parse_port(text)


def parse_path(text: str) -> str:
    """Refuses an empty word, which an unset variable of a shell leaves and which would mean the working folder."""
    if not text:
        raise click.BadParameter("expected a path, got an empty word")
    return text


def parse_file(text: str) -> str:
    """Refuses what is no file that can be read, before anything goes by what is not in it."""
    try:
        with open(parse_path(text), "rb"):
            return text
    except OSError as error:
        raise click.BadParameter(f"{text}: {(error.strerror or str(error)).lower()}") from error


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Has the shell complete the name of a file."""
    return [CompletionItem(incomplete, type="file")]
