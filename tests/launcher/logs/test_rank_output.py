"""A rank's bytes reach its log as they are, its lines the console, its bars the display."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsrun.launcher.failures.causes.recognise import cause_of
from dsrun.launcher.logs.files import LogFiles
from dsrun.launcher.logs.output_index import IndexWriter
from dsrun.launcher.logs.rank_output import JobLog, RankOutput
from dsrun.launcher.logs.reader import read_log
from dsrun.launcher.protocol import Output, StreamName


class Shown:
    """A console and a display that remember."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.notes: list[str] = []
        self.bars: list[str | None] = []

    def lines(self, rank: int, stream: StreamName, texts: Sequence[str]) -> None:
        self.texts += texts

    def begin_line(self, rank: int, stream: StreamName, text: str) -> None:
        self.texts.append(f"{text}...")

    def end_line(self, rank: int, stream: StreamName, rest: str) -> None:
        self.texts.append(f"...{rest}")

    def go_on(self, rank: int, *, typed: bool) -> None:
        self.texts.append("(typed)" if typed else "(goes on)")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def bar(self, rank: int, stream: StreamName, state: str | None) -> None:
        self.bars.append(state)


def rank_output(folder: Path, shown: Shown, *, bars: bool = False) -> RankOutput:
    log = JobLog(LogFiles(folder, 1), IndexWriter(folder), warn=shown.note)
    return RankOutput(0, log, shown, bars=shown if bars else None)


def out(text: str, *, time_s: float = 1.0, stream: StreamName = "stdout") -> Output:
    return Output(rank=0, stream=stream, sequence=0, time_s=time_s, text=text)


def test_the_log_has_every_byte_and_the_console_whole_lines(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown)
    for text in ("10%\r", "20%\r\nbad\udcff", " half", "\n", "no end"):
        output.take(out(text))
    output.finish(last_word="error: x")
    assert (tmp_path / "rank0.log").read_bytes() == b"10%\r20%\r\nbad\xff half\nno end\nerror: x\n"
    assert shown.texts == ["20%", "bad\udcff half", "no end"]


def test_a_rank_that_has_ended_has_no_bar_also_if_a_child_goes_on_with_it(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown, bars=True)
    output.take(out("10%\r20%"))
    output.exited()
    output.take(out("\r30%"))
    assert shown.bars == ["20%", None]
    output.finish()
    assert shown.texts == ["30%"]
    output.begin("again")
    output.take(out("\r40%"))
    assert shown.bars[-1] == "40%"


def test_another_attempt_goes_on_in_the_same_log_after_one_line(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown)
    output.take(out("first, cut"))
    output.finish()
    output.begin("--- attempt 2 ---")
    assert not output.tail
    output.take(out("second\n", time_s=2))
    output.take(out("third\n", time_s=3))
    output.finish()
    assert (tmp_path / "rank0.log").read_text() == "first, cut\n--- attempt 2 ---\nsecond\nthird\n"
    assert [(line.stream, line.text) for line in read_log(tmp_path)] == [
        ("stdout", "first, cut"),
        ("dsrun", "--- attempt 2 ---"),
        ("stdout", "second"),
        ("stdout", "third"),
    ]


def test_bars_go_to_the_display_and_only_their_end_to_the_console(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown, bars=True)
    for second in range(40):
        output.take(out(f"\r{second}%", time_s=second, stream="stderr"))
    output.take(out("\rdone\n", time_s=50, stream="stderr"))
    output.take(out("a line\n", time_s=51))
    assert shown.texts == ["done", "a line"]
    assert shown.bars == [*(f"{second}%" for second in range(40)), None]


def test_a_bar_that_never_ended_is_taken_away_at_the_end(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown, bars=True)
    output.take(out("\r5%"))
    output.finish()
    assert (shown.texts, shown.bars) == (["5%"], ["5%", None])


@contextmanager
def small_files() -> Generator[None, None, None]:
    """No file may grow above 100 bytes: what a full disk does, without one. Holds for pytest's own files too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_log_that_cannot_grow_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown)
    with small_files():
        for number in range(20):
            output.take(out(f"a line of a good length {number}\n"))
        output.finish(last_word="x")
    assert shown.notes == [f"{tmp_path}/rank0.log is incomplete from here on: {os.strerror(27)}"]
    assert len(shown.texts) == 20


def test_an_index_that_cannot_grow_is_told_once_and_the_log_goes_on(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown)
    with small_files():
        for number in range(20):
            output.take(out(f"{number}\n"))
    assert shown.notes == [f"`dsrun logs` cannot order by time from here on: index file: {os.strerror(27)}"]
    assert [line.text for line in read_log(tmp_path)] == [str(number) for number in range(20)]


def test_what_nccls_watchdog_said_stays_among_the_last_lines_however_many_stacks_follow(tmp_path: Path) -> None:
    output = rank_output(tmp_path, Shown())
    said = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=57, OpType=ALLREDUCE"
    output.take(out(f"{said}\n"))
    assert output.tail == (said,)
    output.take(out("".join(f"frame #{number}\n" for number in range(100))))
    assert (output.tail[0], output.tail[1], output.tail[-1]) == (said, "frame #70", "frame #99")
    output.begin("attempt 2")
    assert output.tail == ()


def test_why_torch_ended_a_rank_stays_among_its_last_lines_until_it_is_long_ago(tmp_path: Path) -> None:
    output = rank_output(tmp_path, Shown())
    link = "NET/IB: Got completion from peer 10.40.7.12<4> with status=12 opcode=0 len=0 vendor err 129 (Send)"
    ended = (
        "  what():  [Rank 3] Process group watchdog thread terminated with exception: NCCL error: remote process exited"
    )
    for line in (
        "step 1",
        link.replace("12<4>", "11<4>"),
        ended,
        "ncclRemoteError: A call failed",
        "Last error:",
        link,
    ):
        output.take(out(f"{line}\n"))
    output.take(out("".join(f"  File {number}\n" for number in range(500))))
    assert output.tail[:4] == (ended, "ncclRemoteError: A call failed", link, "  File 470")
    cause = cause_of(-6, "", "", output.tail)
    assert cause is not None
    assert "10.40.7.12" in cause.words
    output.take(out("".join(f"step {number}\n" for number in range(1000))))
    assert output.tail[0] == "step 970"


def test_what_a_rank_has_begun_is_shown_when_it_waits_and_not_twice(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown)
    output.take(out("before\nna"))
    output.show_begun()
    output.take(out("me? "))
    output.show_begun()
    output.show_begun()
    output.go_on(typed=False)
    output.take(out("no answer\nnext\n"))
    assert shown.texts == ["before", "na...", "me? ...", "(goes on)", "...no answer", "next"]
    assert output.tail == ("before", "name? no answer", "next")


def test_a_typed_line_ends_the_prompt_and_the_log_keeps_what_the_rank_wrote(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown)
    output.take(out("name? "))
    output.show_begun()
    output.go_on(typed=True)
    output.take(out("hello\n"))
    output.take(out("half \udcc3"))
    output.show_begun()
    output.take(out("\udca4\n"))
    assert shown.texts == ["name? ...", "(typed)", "hello", "half \udcc3...", "...\udca4"]
    assert output.tail == ("name? ", "hello", "half ä")
    assert (tmp_path / "rank0.log").read_bytes() == "name? hello\nhalf ä\n".encode()


def test_a_bar_is_no_prompt_and_a_prompt_that_becomes_one_is_shown_whole(tmp_path: Path) -> None:
    shown = Shown()
    output = rank_output(tmp_path, shown)
    output.take(out("10%\r20%"))
    output.show_begun()
    assert shown.texts == []
    output.take(out("\r30%\nstep"))
    output.show_begun()
    output.take(out("\rdone\n"))
    assert shown.texts == ["30%", "step...", "done"]
