from __future__ import annotations

import errno
import io
import os
import threading

import pytest

from dsrun.launcher.console.printer import PatientStream, Printer, encode, wants_colour
from dsrun.launcher.protocol import StreamName


class Recorder(io.BytesIO):
    """A stream that remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.writes.append(data)
        return len(data)


class Broken(Recorder):
    """A stream whose writes fail: a pipe nobody reads, unless told otherwise."""

    def __init__(self, code: int = errno.EPIPE) -> None:
        super().__init__()
        self._code = code

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.writes.append(data)
        raise OSError(self._code, os.strerror(self._code))


def test_stdout_is_data_and_stderr_is_talk() -> None:
    out, err = Recorder(), Recorder()
    printer = Printer(stdout=out, stderr=err)
    printer.lines(0, "stdout", ["loss 3.2"])
    printer.lines(1, "stderr", ["slow disk"])
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
    printer.lines(2, "stdout", ["x"])
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
    printer.lines(0, "stdout", ["plain"])
    printer.lines(1, "stdout", ["\x1b[31mred without end"])
    printer.report(["error: x"])
    assert out.writes == [b"\x1b[36m[0]\x1b[0m plain\n", b"\x1b[32m[1]\x1b[0m \x1b[31mred without end\x1b[0m\n"]
    assert err.writes == [b"\x1b[1;31merror:\x1b[0m x\n"]


def test_without_colour_terminal_escapes_pass_unchanged() -> None:
    out = Recorder()
    Printer(stdout=out, stderr=out).lines(0, "stdout", ["\x1b[31mred"])
    assert out.writes == [b"[0] \x1b[31mred\n"]


@pytest.mark.parametrize(
    ("text", "data"),
    [("ä", "ä".encode()), ("\udcff\udc80", b"\xff\x80"), ("\ud800", rb"\ud800"), ("a\x00b", b"a\x00b")],
)
def test_any_text_can_be_printed(text: str, data: bytes) -> None:
    assert encode(text) == data


def test_a_reader_that_goes_away_is_reported_once_and_the_other_stream_goes_on() -> None:
    calls: list[str] = []
    out, err = Broken(), Recorder()
    printer = Printer(stdout=out, stderr=err, on_closed=lambda: calls.append("closed"))
    for _ in range(3):
        printer.lines(0, "stdout", ["y"])
    printer.note("stopping")
    assert (len(out.writes), calls, printer.closed) == (1, ["closed"], True)
    assert err.writes == [b"dsrun: stopping\n"]


def test_a_full_disk_is_told_on_the_other_stream_and_stops_nothing() -> None:
    calls: list[str] = []
    out, err = Broken(errno.ENOSPC), Recorder()
    printer = Printer(stdout=out, stderr=err, on_closed=lambda: calls.append("closed"))
    printer.lines(0, "stdout", ["y"])
    printer.lines(0, "stdout", ["y"])
    assert (len(out.writes), calls) == (1, [])
    assert err.writes == [b"dsrun: stdout cannot be written: No space left on device; the logs are complete\n"]


def test_nothing_that_can_be_written_to_is_left_to_say_so() -> None:
    broken = Broken(errno.ENOSPC)
    printer = Printer(stdout=broken, stderr=broken)
    printer.lines(0, "stdout", ["y"])
    printer.note("done")
    assert len(broken.writes) == 2


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_comes_late_gets_every_byte_and_the_writer_looks_around_meanwhile(blocking: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    lines = ["x" * 100_000, *map(str, range(20_000))]
    read: list[bytes] = []

    def read_all() -> None:
        with open(reader, "rb") as source:
            read.append(source.read())

    late = threading.Thread(target=read_all)

    def keep_waiting() -> bool:
        if not late.ident:
            late.start()
        return True

    stream = PatientStream(writer, keep_waiting)
    Printer(stdout=stream, stderr=stream).lines(0, "stdout", lines)
    os.close(writer)
    late.join(10)
    assert read == ["".join(f"[0] {line}\n" for line in lines).encode()]


def test_a_reader_that_does_not_read_is_left_when_the_wait_is_over() -> None:
    reader, writer = os.pipe()
    stream = PatientStream(writer, lambda: False)
    printer = Printer(stdout=stream, stderr=stream)
    printer.lines(0, "stdout", ["x" * 1_000_000])
    assert printer.closed
    os.close(reader)
    os.close(writer)


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


def test_lines_that_several_ranks_wrote_name_them_all_and_no_host() -> None:
    out = Recorder()
    printer = Printer(stdout=out, stderr=out, hosts=("w0", "w0", "w1"), stdout_colour=True)
    printer.lines_of((0, 1, 2), "stdout", ["x", "y"])
    assert out.writes == [b"\x1b[1m[0-2]\x1b[0m x\n\x1b[1m[0-2]\x1b[0m y\n"]


def test_what_is_around_lines_goes_with_them_in_one_write() -> None:
    out = Recorder()
    printer = Printer(stdout=out, stderr=out, around=lambda text: f"<{text}>")
    printer.lines(0, "stdout", ["x"])
    printer.note("y")
    printer.raw("rows")
    assert out.writes == [b"<[0] x\n>", b"<dsrun: y\n>", b"rows"]


def shown(printer_out: Recorder) -> str:
    return b"".join(printer_out.writes).decode()


def test_a_line_that_is_begun_is_shown_at_once_and_goes_on_behind_its_beginning() -> None:
    out, err = Recorder(), Recorder()
    printer = Printer(stdout=out, stderr=err)
    printer.begin_line(0, "stdout", "na")
    printer.begin_line(0, "stdout", "me? ")
    assert shown(out) == "[0] name? "
    printer.note("stderr is elsewhere, and breaks nothing")
    printer.end_line(0, "stdout", "hello")
    printer.lines(0, "stdout", ["next"])
    assert shown(out) == "[0] name? hello\n[0] next\n"
    assert not printer.is_mid_line


def test_a_prompt_is_shown_again_below_what_comes_between() -> None:
    out = Recorder()
    printer = Printer(stdout=out, stderr=out, one_place=True)
    printer.begin_line(0, "stdout", "name? ")
    printer.lines(1, "stdout", ["a", "b"])
    printer.note("news")
    assert shown(out) == "[0] name? \n[1] a\n[1] b\n[0] name? \ndsrun: news\n[0] name? "
    printer.go_on(0, typed=False)
    printer.lines(1, "stderr", ["c"])
    printer.end_line(0, "stdout", "")
    printer.end_line(0, "stdout", "hello")
    assert shown(out).endswith("[0] name? \n[1] c\n[0] hello\n"), "nobody waits for an answer any more"


@pytest.mark.parametrize(("typed_on", "between"), [(["stdout"], "[0] "), ([], "")])
def test_a_line_that_was_typed_ends_the_prompt_where_it_is_seen(typed_on: list[StreamName], between: str) -> None:
    out = Recorder()
    printer = Printer(stdout=out, stderr=out, one_place=True, typed_on=typed_on)
    printer.begin_line(0, "stdout", "name? ")
    printer.go_on(0, typed=True)
    printer.end_line(0, "stdout", "hello")
    assert shown(out) == f"[0] name? {between}hello\n"
