"""One command as the line that a login shell over ssh reads, and where in its streams the command's own output begins.

Pure: both ways of ssh use it, and connect to nothing here. An ssh server knows no words, only one line for the user's
login shell, whatever shell that is; it may print before it starts anything, and so may the server's banner.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from dsrun.errors import LaunchError

from ..hosts.spec import HostSpec

#: Ends what was printed before the command, on both streams.
MARK = b"dsrun: the command starts here\n"
#: Of what was printed before it, for messages.
_KEPT_BYTES = 1 << 14
#: Of the printable bytes, those that do not mean themselves between the quotes of every shell.
_TOUCHED = b"!'\"$`\\"
#: What a shell ends with for a program that is not there, and one that cannot be run.
NOT_FOUND, NOT_EXECUTABLE = 127, 126


def remote_line(host: HostSpec, argv: Sequence[str]) -> bytes:
    """Returns the line that runs `argv` with identical bytes behind any login shell.

    `/bin/sh` is run by the login shell, which may be csh or fish, and so reads one word only, quoted in a way that all
    of them have in common. It stays as the command's parent: a server tells of a signal in a way that clients lose,
    the shell as 128 + its number.

    Args:
        host: host that the error names; it is not contacted.
        argv: the command's words; undecodable bytes as surrogate escapes.

    Raises:
        LaunchError: a word holds a NUL byte, or the program's name would be read as an option.
    """
    if any("\0" in word for word in argv):
        raise LaunchError(f"host {host.name}: a word of the command holds a NUL byte, which no program can be given")
    if argv[0].startswith("-"):
        raise LaunchError(f"host {host.name}: cannot run {argv[0]!r}: a program's name does not start with a dash")
    program, mark = shlex.quote(argv[0]), shlex.quote(MARK.decode().rstrip())
    script = (
        f"command -v {program} >/dev/null || exit {NOT_FOUND}; "
        f"echo {mark}; echo {mark} >&2; {shlex.join(argv)}; exit $?"
    )
    return b'exec /bin/sh -c \'eval "$(printf %%b "%s")"\'' % _escape(os.fsencode(script))


def _escape(script: bytes) -> bytes:
    """Writes what some shell would touch between its quotes as octal numbers, which `printf %b` turns back.

    In single quotes csh replaces `!` and fish a doubled backslash, and csh wants them closed before the line ends; in
    the double quotes within, sh reads `$`, backquotes and backslashes. A number has three digits always, and a
    backslash before a digit means nothing to any of them.
    """
    plain = range(ord(" "), ord("~") + 1)
    return b"".join(b"%c" % byte if byte in plain and byte not in _TOUCHED else b"\\0%03o" % byte for byte in script)


def status_of(shell_status: int) -> int:
    """Turns the shell's status into that of `Channel.wait`: 137 -> -9. 255 is ssh's own and stays."""
    return 128 - shell_status if 128 < shell_status <= 128 + 64 else shell_status


class Preamble:
    """One stream, up to where the command's own output begins."""

    def __init__(self) -> None:
        #: Whether the command's output has begun.
        self.is_over = False
        #: What the command has printed since.
        self.rest = b""
        self._seen = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        if self.is_over:
            self.rest += data
            return
        self._seen += data
        before, mark, after = self._seen.partition(MARK)
        if mark:
            self._seen, self.rest, self.is_over = before, bytes(after), True
        # A part of the mark may be at the end.
        del self._seen[:-_KEPT_BYTES]

    @property
    def text(self) -> str:
        """What came before, the last of it."""
        return self._seen.decode(errors="replace")
