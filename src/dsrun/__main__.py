"""Entry of `dsrun` and of `python -m dsrun`: sees to Ctrl-C first, and imports the command line then."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line and exits. Whoever interrupts it at any moment sees no traceback."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        # Imports take a while, and nothing has begun that would have to be ended.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dsrun.launcher.cli import main as run

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        # The exit code stands; only the interpreter is left to be taken down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
