"""Lines come whole, bars come folded, nothing is lost and memory stays bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.launcher.logs.lines import CUT_MARK, LineAssembler


def assemble(*chunks: bytes, at_s: float = 0.0, max_line_bytes: int = 100) -> list[str]:
    assembler = LineAssembler(max_line_bytes=max_line_bytes)
    lines = [line for chunk in chunks for line in assembler.feed(chunk, now_s=at_s)]
    return lines + assembler.finish()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\r\nb\n", ["a", "b"]),
        (b"a" + b"\r" * 9 + b"\nb\n", ["a", "b"]),
        (b"no end", ["no end"]),
        (b"10%\r20%\r100%\ndone\n", ["100%", "done"]),
        (b"\r 10%\r 20%\n", [" 20%"]),
        (b"10%\r20%\r", ["20%"]),
        (b"\r", []),
        (b"nul \0 byte\n", ["nul \0 byte"]),
        (b"bad \xff\xc3\n", ["bad \udcff\udcc3"]),
        ("zwölf\n".encode(), ["zwölf"]),
    ],
)
def test_lines_are_what_a_terminal_would_show(data: bytes, lines: list[str]) -> None:
    assert assemble(data) == lines


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\xc3", b"\xa4", b"\0"]), max_size=12).map(b"".join), st.data())
def test_lines_do_not_depend_on_where_the_stream_is_cut(data: bytes, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data)))
    assert assemble(data[:cut], data[cut:]) == assemble(data)


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\xff"]), max_size=12).map(
        lambda parts: b"".join(parts) + b"\n"
    )
)
def test_whole_lines_that_may_be_too_long_are_folded_alike(data: bytes) -> None:
    assert assemble(data, max_line_bytes=3) == [
        piece
        for line in assemble(data)
        for raw in [line.encode("utf-8", "surrogateescape")]
        for start in range(0, max(1, len(raw)), 3)
        for piece in [raw[start : start + 3].decode("utf-8", "surrogateescape") + CUT_MARK * (start + 3 < len(raw))]
    ]


@given(st.binary(max_size=60).filter(lambda data: b"\r" not in data))
def test_without_bars_no_byte_is_lost(data: bytes) -> None:
    lines = assemble(data, max_line_bytes=7)
    joined = "".join(line.removesuffix(CUT_MARK) if line.endswith(CUT_MARK) else line + "\n" for line in lines)
    assert joined.encode("utf-8", "surrogateescape") == (data if data.endswith(b"\n") or not data else data + b"\n")


def test_a_long_line_is_delivered_in_marked_pieces_before_it_ends() -> None:
    assembler = LineAssembler(max_line_bytes=10)
    assert assembler.feed(b"x" * 25, now_s=0) == ["x" * 10 + CUT_MARK, "x" * 10 + CUT_MARK]
    assert assembler.feed(b"\n", now_s=0) == ["x" * 5]


def test_a_long_line_is_not_cut_inside_a_character() -> None:
    assert assemble("€€€€\n".encode(), max_line_bytes=4) == ["€" + CUT_MARK] * 3 + ["€"]


def test_a_bar_that_runs_for_long_shows_its_state_now_and_then() -> None:
    assembler = LineAssembler(bar_interval_s=10)
    shown = [line for second in range(31) for line in assembler.feed(b"\rstep %d" % second, now_s=second)]
    assert shown == ["step 9", "step 19", "step 29"]
    assert assembler.feed(b"\n", now_s=31) == ["step 30"]


def test_a_bar_takes_no_memory_however_long_it_runs() -> None:
    assembler = LineAssembler(max_line_bytes=100)
    lines = [line for _ in range(10_000) for line in assembler.feed(b"\r" + b"#" * 50, now_s=0)]
    assert lines == []
    assert assembler.finish() == ["#" * 50]


def test_the_present_state_of_a_bar_can_be_seen_until_its_line_ends() -> None:
    assembler = LineAssembler()
    assembler.feed(b"a line\nhalf", now_s=0)
    assert assembler.bar is None
    assembler.feed(b"\r10%", now_s=0)
    assert assembler.bar == "10%"
    assembler.feed(b"\r20%\r", now_s=0)
    assert assembler.bar == "20%"
    assert assembler.feed(b"\r100%\n", now_s=0) == ["100%"]
    assert assembler.bar is None
    assembler.feed(b"1\r2", now_s=0)
    assert assembler.finish() == ["2"]
    assert assembler.bar is None
