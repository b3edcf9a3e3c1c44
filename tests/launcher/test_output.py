from __future__ import annotations

import io
import os

import pytest

from dsrun.launcher.output import Printer, encode, wants_colour


class Recorder(io.BytesIO):
    """A stream that remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.writes.append(data)
        return len(data)


class Closed(Recorder):
    """A pipe nobody reads."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.writes.append(data)
        raise BrokenPipeError


def test_stdout_is_data_and_stderr_is_talk() -> None:
    out, err = Recorder(), Recorder()
    printer = Printer(stdout=out, stderr=err)
    printer.line(0, "stdout", "loss 3.2")
    printer.line(1, "stderr", "slow disk")
    printer.note("job ends")
    printer.warning("warning: ds.json: no effect")
    printer.report(["error: rank 1 exited with code 3", "  | slow disk"])
    assert out.writes == [b"[0] loss 3.2\n"]
    assert err.writes == [
        b"[1] slow disk\n",
        b"dsrun: job ends\n",
        b"warning: ds.json: no effect\n",
        b"error: rank 1 exited with code 3\n",
        b"  | slow disk\n",
    ]


def test_the_tag_names_the_host_where_there_are_several() -> None:
    out = Recorder()
    printer = Printer(stdout=out, stderr=out, hosts=("w0", "w0", "w1"))
    printer.line(2, "stdout", "x")
    assert out.writes == [b"[w1:2] x\n"]


def test_quiet_drops_talk_and_keeps_errors() -> None:
    err = Recorder()
    printer = Printer(stdout=err, stderr=err, quiet=True)
    printer.note("job starts")
    printer.warning("warning: x")
    printer.report(["error: x"])
    assert err.writes == [b"error: x\n"]


def test_colour_marks_the_tag_and_ends_with_the_line() -> None:
    out, err = Recorder(), Recorder()
    printer = Printer(stdout=out, stderr=err, stdout_colour=True, stderr_colour=True)
    printer.line(0, "stdout", "plain")
    printer.line(1, "stdout", "\x1b[31mred without end")
    printer.report(["error: x"])
    assert out.writes == [b"\x1b[36m[0]\x1b[0m plain\n", b"\x1b[32m[1]\x1b[0m \x1b[31mred without end\x1b[0m\n"]
    assert err.writes == [b"\x1b[1;31merror:\x1b[0m x\n"]


def test_without_colour_terminal_escapes_pass_unchanged() -> None:
    out = Recorder()
    Printer(stdout=out, stderr=out).line(0, "stdout", "\x1b[31mred")
    assert out.writes == [b"[0] \x1b[31mred\n"]


@pytest.mark.parametrize(
    ("text", "data"),
    [("ä", "ä".encode()), ("\udcff\udc80", b"\xff\x80"), ("\ud800", rb"\ud800"), ("a\x00b", b"a\x00b")],
)
def test_any_text_can_be_printed(text: str, data: bytes) -> None:
    assert encode(text) == data


def test_a_reader_that_goes_away_is_reported_once_and_the_other_stream_goes_on() -> None:
    calls: list[str] = []
    out, err = Closed(), Recorder()
    printer = Printer(stdout=out, stderr=err, on_closed=lambda: calls.append("closed"))
    for _ in range(3):
        printer.line(0, "stdout", "y")
    printer.note("stopping")
    assert (len(out.writes), calls, printer.closed) == (1, ["closed"], True)
    assert err.writes == [b"dsrun: stopping\n"]


def test_a_terminal_that_someone_made_non_blocking_loses_no_line() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    class FullOnce(io.FileIO):
        def write(self, data: bytes, /) -> int | None:  # type: ignore[override]
            return super().write(data[:3]) if os.get_blocking(self.fileno()) else None

    with FullOnce(writer, "w") as stream, open(reader, "rb") as source:
        Printer(stdout=stream, stderr=stream).line(0, "stdout", "a long line")
        assert source.read(16) == b"[0] a long line\n"


@pytest.mark.parametrize(
    ("environ", "is_terminal", "wanted"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colour_is_for_terminals_unless_told_otherwise(
    environ: dict[str, str], is_terminal: bool, wanted: bool
) -> None:
    assert wants_colour(environ, is_terminal=is_terminal) is wanted
