"""A machine that refuses says which limit to raise."""

from __future__ import annotations

import errno
import os

import pytest

from dsrun.launcher.os_errors import refusal_of


def _error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_error(errno.EMFILE), "too many open files; raise `ulimit -n`"),
        (_error(errno.EAGAIN), "resource temporarily unavailable; raise `ulimit -u`"),
        (RuntimeError("can't start new thread"), "resource temporarily unavailable; raise `ulimit -u`"),
        (_error(errno.ENOENT, "/x"), "/x: no such file or directory"),
        (OSError("odd"), "odd"),
    ],
)
def test_a_refusal_is_told_with_the_limit_that_was_reached(error: OSError | RuntimeError, words: str) -> None:
    assert refusal_of(error) == words


def test_a_fault_of_ours_is_no_refusal() -> None:
    assert refusal_of(RuntimeError("list changed size during iteration")) is None
