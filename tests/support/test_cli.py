"""What the way to run commands in this process promises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from .cli import invoke


class _Cycle:
    """An object that refers to itself, as engines of other tests do that nobody has any more."""

    def __init__(self) -> None:
        self.itself = self
        weakref.finalize(self, print, "said when it was collected")


@pytest.fixture
def collected_early() -> Iterator[None]:
    """Has garbage collected after a hundred new objects, which a command makes and its start does not."""
    before = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collected_early")
def test_what_garbage_says_when_it_is_collected_is_not_in_a_commands_output() -> None:
    gc.collect()
    _Cycle()
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert "Usage" in shown.stdout
    assert "said when it was collected" not in shown.stdout
    assert gc.isenabled()
