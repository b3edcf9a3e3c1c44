"""docs/guides/sync.md: its file of variables is read as it says, and its errors are those that are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.plan.env_file import parse_env_file

GUIDE = (Path(__file__).parents[3] / "docs/guides/sync.md").read_text()


def block(start: str) -> str:
    match = re.search(rf"```\w*\n({re.escape(start)}.*?)```", GUIDE, re.S)
    assert match is not None, f"the guide has a block that begins with {start!r}"
    return match[1]


def test_the_file_of_the_guide_means_what_it_says() -> None:
    assert parse_env_file(block("# comment"), name="job.env") == {
        "NCCL_DEBUG": "WARN",
        "WANDB_MODE": "offline",
        "HF_TOKEN": "hf_$as_it_is",
        "GREETING": 'two\nlines, a "quote" and a $',
        "KEY": "-----BEGIN KEY-----\nmore lines\n-----END KEY-----",
    }


def test_the_errors_of_the_guide_are_those_that_are_printed() -> None:
    with pytest.raises(UsageError) as caught:
        parse_env_file("# paths\nDATA=/data/$USER\nRANK=3\n", name="job.env")
    assert caught.value.render() == block("error: job.env").rstrip("\n")
