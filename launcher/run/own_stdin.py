"""dsrun's own stdin, for the rank that gets it: kept open for all attempts, and as it was when they have ended.

The rank reads from the very descriptor, a terminal or a pipe. See decision 0039. Starts nothing, and reads nothing.

[Note: the terminal's job control] Ranks are in a session of their own, where a terminal of another session is a file:
it can be read and set, and sends no SIGTTIN. So no rank is ever stopped for reading, and none needs to be the
terminal's foreground group: Ctrl-C goes to dsrun, which decides. The other side of it: a dsrun in the background would
take what is typed for the shell. Its ranks get an empty stdin.
"""

from __future__ import annotations

import os
import termios
from contextlib import suppress
from typing import Any

_STDIN = 0


class OwnStdin:
    """What a rank reads.

    Args:
        wanted: a rank is to have it.
    """

    def __init__(self, *, wanted: bool) -> None:
        #: dsrun stands in the background of its terminal, so that it is no rank's.
        self.is_in_background = wanted and not is_in_foreground()
        #: What is handed on; None for nothing.
        self.descriptor = os.dup(_STDIN) if wanted and not self.is_in_background else None
        self._blocks = self.descriptor is None or os.get_blocking(self.descriptor)
        self._settings = None if self.descriptor is None else _settings_of(self.descriptor)

    def close(self) -> None:
        """Leaves the terminal as it was found, whatever a rank that was killed had made of it; may be called twice."""
        if self.descriptor is None:
            return
        settings = self._settings
        # From the background it would stop this process.
        if settings is not None and is_in_foreground() and _settings_of(self.descriptor) != settings:
            with suppress(termios.error):
                termios.tcsetattr(self.descriptor, termios.TCSANOW, settings)
        if os.get_blocking(self.descriptor) != self._blocks:
            # The flag is the open file's, so that it is the shell's too.
            os.set_blocking(self.descriptor, self._blocks)
        os.close(self.descriptor)
        self.descriptor = None


def is_in_foreground() -> bool:
    """Whether what is typed is for this process, where stdin is a terminal at all."""
    try:
        return not os.isatty(_STDIN) or os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        # A terminal that is not this session's own has no foreground here.
        return True


def _settings_of(descriptor: int) -> list[Any] | None:
    try:
        return termios.tcgetattr(descriptor)
    except termios.error:
        return None
