"""The page of a job on a terminal, drawn again as the job goes on, until it ends or a key leaves it.

The page has the terminal's second screen, so that a terminal that becomes narrower breaks no row of it; the last page
is then left on the first screen.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live

from .keys import Keys
from .log_tail import LogTail
from .page import page_rows
from .run_view import RunWatcher

if TYPE_CHECKING:
    from rich.console import Console

#: Least time between two drawings.
DRAW_S = 0.25
#: Most seconds of a look that are spent on records: what is left of a long file comes with the next drawing.
_READ_S = DRAW_S
_KEYS = "q leaves, the job goes on   l log"


def show_page(console: Console, watcher: RunWatcher, *, lines: int | None = None) -> None:
    """Draws the page once.

    Args:
        console: terminal or file to draw on.
        watcher: follower of the job.
        lines: most rows; None for the height of the terminal.
    """
    console.print(_page(console, watcher, lines=lines or console.size.height - 1), end="")


def follow_page(console: Console, watcher: RunWatcher) -> bool:
    """Draws the page until the job ends or a person leaves it; leaves the last page on the terminal.

    Args:
        console: terminal to draw on.
        watcher: follower of the job.

    Returns:
        whether the job has ended.

    Raises:
        OSError: the job's files cannot be read.
    """
    # Ctrl-C is a way to leave, as `q` is.
    with suppress(KeyboardInterrupt), _leaving_properly():
        _follow(console, watcher)
    show_page(console, watcher)
    return not watcher.job.state.is_live


@contextmanager
def _leaving_properly() -> Generator[None, None, None]:
    """Has SIGTERM unwind the stack, so that the terminal gets its first screen and its settings back.

    A page that is stopped by Ctrl-Z would leave the second screen to the shell, so it is not.
    """

    def leave(signum: int, _frame: object) -> None:
        sys.exit(128 + signum)

    before = {
        signum: signal.signal(signum, handler)
        for signum, handler in ((signal.SIGTERM, leave), (signal.SIGHUP, leave), (signal.SIGTSTP, signal.SIG_IGN))
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _follow(console: Console, watcher: RunWatcher) -> None:
    shows_log = False
    drawn_size, drawn_s = None, -DRAW_S
    with (
        Keys() as keys,
        LogTail(watcher.job.folder) as tail,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        while True:
            is_new = watcher.look(budget_s=_READ_S)
            if is_new or console.size != drawn_size:
                drawn_size = console.size
                log = tail.lines() if shows_log else None
                named = _KEYS if keys.are_read else "Ctrl-C leaves, the job goes on"
                live.update(_page(console, watcher, lines=drawn_size.height, log=log, keys=named), refresh=True)
                drawn_s = time.monotonic()
            if not watcher.job.state.is_live and watcher.figures.is_complete:
                return
            # Of a long file the rest is read at once, and keys are looked for in between.
            pause_s = max(0.01, drawn_s + DRAW_S - time.monotonic()) if watcher.figures.is_complete else 0.0
            for key in keys.wait(pause_s):
                match key.lower():
                    case "q":
                        return
                    case "l":
                        shows_log = not shows_log
                        drawn_size = None
                    case _:
                        pass


def _page(console: Console, watcher: RunWatcher, *, lines: int, log: list[str] | None = None, keys: str = "") -> Group:
    return Group(
        *page_rows(
            watcher.view(),
            columns=console.size.width,
            lines=lines,
            log=log,
            keys=keys,
            ascii_only=not console.encoding.startswith("utf"),
        )
    )
