"""Tests marked `cuda` are skipped, by name, where torch sees no GPU; `bash scripts/gpu_check` runs them on one.

Tests marked `soak` are left out unless asked for: see tests/support/soak.py.

[Note: ignored signals] `nohup` has a command ignore SIGHUP, and a shell's `( ... & )` SIGINT and SIGQUIT; whatever it
starts ignores them too. Tests start programs that are to die of them. So the process that runs tests takes them and
does nothing: it goes on as it was told to, and what it starts has the defaults, for a program that is executed keeps
what is ignored and not what is handled. With pytest-xdist the workers do so, which are programs that were started.
"""

from __future__ import annotations

import atexit
import gc
import signal
from collections.abc import Generator

import pytest

from support import soak, speed


def pytest_addoption(parser: pytest.Parser) -> None:
    soak.add_option(parser)
    speed.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Gives the programs that tests start the default signals; see [Note: ignored signals]."""
    speed.register(config)
    has_workers = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if not has_workers and signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, _go_on)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage among what tests are made of, neither while it grows nor later.

    Twelve thousand tests and all that they import make little garbage and much that the collector would look at.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# What is frozen is freed at the end all the same, or nanobind calls it leaked.
atexit.register(gc.unfreeze)


def _go_on(_signum: int, _frame: object) -> None:
    """Is done where a signal was ignored."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak.leave_out(config, items)
    speed.note_reasons(items)
    marked = [item for item in items if item.get_closest_marker("cuda") is not None]
    if marked and not _sees_a_gpu():
        without = pytest.mark.skip(reason="needs a CUDA GPU: `bash scripts/gpu_check --only proofs` runs it on one")
        for item in marked:
            item.add_marker(without)


def _sees_a_gpu() -> bool:
    import torch  # most tests of the launcher do without it

    return torch.cuda.is_available()
