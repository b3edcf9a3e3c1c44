"""Bytes as a rank wrote them -> whole lines as a person reads them. Pure: no I/O, the time is an argument.

[Note: folding] What a terminal would show at the end of the line is what is delivered:
- `\\n` and `\\r\\n` end a line. Any other `\\r` starts it over, so of a progress bar only the last state remains.
- A bar that runs for long would be silent until its end. So a state that was overwritten is delivered as a
  line of its own when the line it belongs to has shown nothing for BAR_INTERVAL_S.
- Invalid UTF-8 stays as surrogate escapes and NUL stays NUL: how to show them is for the output.
- A line longer than the limit is delivered in pieces, each but the last ending in CUT_MARK, so memory is bounded.
"""

from __future__ import annotations

import re

#: Seconds between two delivered states of one progress bar.
BAR_INTERVAL_S = 10.0
#: Longest line delivered in one piece.
MAX_LINE_BYTES = 1 << 20
#: Ends every piece of a long line but the last.
CUT_MARK = " [line goes on]"

_LINE_END = re.compile(rb"\r+\n")


class LineAssembler:
    """The lines of one stream. See [Note: folding]."""

    def __init__(self, *, max_line_bytes: int = MAX_LINE_BYTES, bar_interval_s: float = BAR_INTERVAL_S) -> None:
        self._max_line_bytes = max_line_bytes
        self._bar_interval_s = bar_interval_s
        self._pending = b""
        self._shown_at_s: float | None = None
        self._is_bar = False

    @property
    def bar(self) -> str | None:
        """The state of the line that is being written, if it has been started over; else None."""
        return _text(self._pending.rstrip(b"\r")) if self._is_bar else None

    @property
    def begun(self) -> bytes:
        """What has been written of a line so far; empty for a bar."""
        return b"" if self._is_bar else self._pending

    def feed(self, data: bytes, *, now_s: float) -> list[str]:
        """Returns the lines that `data` completes.

        Args:
            data: the next bytes of the stream, cut anywhere.
            now_s: time when the bytes were written, in seconds by any clock that does not go back.
        """
        lines: list[str] = []
        data = self._pending + data
        end = data.rfind(b"\n") + 1
        whole, rest = data[:end], data[end:]
        if end:
            lines = _states(whole) if end <= self._max_line_bytes else self._all_pieces(whole)
            self._shown_at_s, self._is_bar = None, False
        self._pending = self._hold(rest, now_s, lines) if b"\r" in rest or len(rest) > self._max_line_bytes else rest
        return lines

    def finish(self) -> list[str]:
        """Returns what is left when the stream ends without a newline; the assembler is empty afterwards."""
        rest, self._pending, self._is_bar = self._pending, b"", False
        state = _last_state(rest.rstrip(b"\r"))
        return self._pieces(state) if state else []

    def _hold(self, rest: bytes, now_s: float, lines: list[str]) -> bytes:
        """Returns what must wait for more bytes, after delivering a bar's state or the pieces of a long line."""
        if b"\r" in rest:
            self._is_bar = True
            # A `\r` at the very end may be half of `\r\n`, so it and the state before it are kept.
            body = rest.rstrip(b"\r")
            state = _last_state(body)
            overwritten = _last_state(body[: len(body) - len(state)].rstrip(b"\r"))
            if self._shown_at_s is None:
                self._shown_at_s = now_s
            elif overwritten and now_s - self._shown_at_s >= self._bar_interval_s:
                lines += self._pieces(overwritten)
                self._shown_at_s = now_s
            rest = state + (b"\r" if len(body) < len(rest) else b"")
        if len(rest) > self._max_line_bytes:
            *pieces, rest = self._cut(rest)
            lines += [_text(piece) + CUT_MARK for piece in pieces]
        return rest

    def _all_pieces(self, whole: bytes) -> list[str]:
        """Returns lines of which some may be too long."""
        lines = whole[:-1].split(b"\n")
        return [piece for line in lines for piece in self._pieces(_last_state(line.rstrip(b"\r")))]

    def _pieces(self, line: bytes) -> list[str]:
        *first, last = self._cut(line)
        return [*(_text(piece) + CUT_MARK for piece in first), _text(last)]

    def _cut(self, line: bytes) -> list[bytes]:
        """Cuts a long line at the limit, moved back to the start of a UTF-8 character where there is one."""
        pieces: list[bytes] = []
        while len(line) > self._max_line_bytes:
            end = self._max_line_bytes
            # At most three continuation bytes (10xxxxxx) follow a leading byte; more is no UTF-8 anyway.
            while end > max(1, self._max_line_bytes - 3) and line[end] & 0xC0 == 0x80:
                end -= 1
            pieces.append(line[:end])
            line = line[end:]
        return [*pieces, line]


def _states(whole: bytes) -> list[str]:
    """Returns what is left of whole lines; all at once, as programs write millions."""
    while b"\r\n" in whole:
        # Any number of `\r` before `\n`: a pseudo-terminal adds one more to each `\r\n`.
        whole = whole.replace(b"\r\n", b"\n") if b"\r\r\r\n" not in whole else _LINE_END.sub(b"\n", whole)
    lines = _text(whole[:-1]).split("\n")
    return [line[line.rfind("\r") + 1 :] for line in lines] if b"\r" in whole else lines


def _last_state(line: bytes) -> bytes:
    return line[line.rfind(b"\r") + 1 :]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "surrogateescape")
