"""Ranks start with everything there that is alike in all of them."""

from __future__ import annotations

import sys

from support import killed_saves, ranks
from support.ranks import run_ranks


def _missing() -> list[str]:
    names = ("torch._dynamo", "dsrun.runtime.engine.initialize", "support.preloaded")
    return [name for name in names if name not in sys.modules]


def test_a_rank_has_torch_and_dsrun_before_it_is_forked() -> None:
    """The server passes over what it cannot import without a word, and forgets what it was told first."""
    assert killed_saves.forkserver is ranks.forkserver
    assert run_ranks(1, _missing) == [[]]
