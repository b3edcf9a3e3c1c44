"""Keys that are typed at a page, as they come. Knows no page."""

from __future__ import annotations

import os
import select
import termios
import time
import tty
from collections.abc import Sequence
from typing import Any


class Keys:
    """Single keys of stdin without their echo, where that is a terminal; the terminal is as before after the block.

    Ctrl-C stays a signal. A process in the background changes no terminal, and gets no keys.

    Args:
        descriptor: Descriptor that is read.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        try:
            if os.isatty(self._descriptor) and os.tcgetpgrp(self._descriptor) == os.getpgrp():
                self._before = termios.tcgetattr(self._descriptor)
                tty.setcbreak(self._descriptor)
        except (OSError, termios.error):
            self._before = None
        return self

    def __exit__(self, _type: object, _error: object, _stack: object) -> None:
        if self._before is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    @property
    def are_read(self) -> bool:
        """Whether there is a terminal that keys come from."""
        return self._before is not None

    def wait(self, timeout_s: float) -> Sequence[str]:
        """Waits for a key, or so long; returns those that were typed."""
        if self._before is None:
            time.sleep(timeout_s)
            return ()
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return ()
        data = os.read(self._descriptor, 64)
        if not data:
            # The terminal is gone; waiting on it would never wait again.
            self._before = None
        return data.decode("utf-8", "ignore")
