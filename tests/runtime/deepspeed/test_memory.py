"""Lines about memory have DeepSpeed's figures, on rank 0 or where a script wants them."""

from __future__ import annotations

import re

import psutil
import pytest

from dsrun.runtime.deepspeed.memory import empty_cache, get_ma_status, memory_status, see_memory_usage


def test_memory_in_use_is_printed_if_forced(capsys: pytest.CaptureFixture[str]) -> None:
    see_memory_usage("before")
    assert capsys.readouterr().out == ""
    see_memory_usage("after", force=True)
    first, figures, host = capsys.readouterr().out.splitlines()
    assert first == "after"
    assert re.fullmatch(r"MA [\d.]+ GB +Max_MA [\d.]+ GB +CA [\d.]+ GB +Max_CA \d+ GB *", figures)
    assert re.fullmatch(r"CPU Virtual Memory:  used = [\d.]+ GB, percent = [\d.]+%", host)


def test_a_status_says_what_came_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    memory_status("here")
    memory_status("again", reset_max=True)
    memory_status("not this rank", print_rank=5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("RANK=0 MEMSTATS again device=")
    found = re.findall(r"current (alloc|cache)=([\d.]+)GB \(delta=(-?[\d.]+)GB max=([\d.]+)GB\)", lines[1])
    assert [name for name, *_ in found] == ["alloc", "cache"]
    before = re.findall(r"current \w+=([\d.]+)GB", lines[0])
    for (_, now, delta, most), last in zip(found, before, strict=True):
        assert float(now) - float(last) == pytest.approx(float(delta), abs=2e-4)
        assert float(most) >= float(now)


def test_memory_of_tensors_is_there_to_ask() -> None:
    empty_cache()
    assert 0 <= get_ma_status() <= psutil.virtual_memory().total
