"""Tables of one host and of many read as reviewed, within the terminal's width and without colour."""

from __future__ import annotations

from collections.abc import Iterable

import click
import pytest

from dsrun.launcher.probe.table import fold_verdicts, host_lines, many_lines, verdict_lines
from dsrun.launcher.table_rows import Row, RowKind


def bare(lines: Iterable[str]) -> str:
    text = "".join(click.unstyle(line) + "\n" for line in lines)
    assert all(line == line.rstrip() for line in text.splitlines())
    return text


def host(name: str, *, torch: str = "2.13.0+cu128", driver: str = "570.1", free: int = 90) -> list[Row]:
    return [
        Row("host", "name", name, RowKind.OWN),
        Row("host", "system", "Debian 12"),
        Row("disk", "free", f"{free} GiB of 100 GiB", RowKind.NOW, f"{free} GiB", free),
        Row("versions", "torch", torch),
        Row("versions", "driver", driver),
    ]


def test_a_value_is_folded_under_itself_and_a_section_stands_once() -> None:
    rows = [Row("cpu", "model", "Xeon"), Row("cpu", "isa", "avx2 avx512f avx512bw amx_tile"), Row("gpu", "none", "no")]
    assert bare(host_lines(rows, width=36)) == (
        "cpu  model  Xeon\n"
        "     isa    avx2 avx512f avx512bw\n"
        "            amx_tile\n"
        "gpu  none   no\n"
    )  # fmt: skip


def test_text_of_other_hosts_moves_no_cursor() -> None:
    assert "\x1b" not in bare(host_lines([Row("gpu", "0", "H\x1b[2J200\x07")], width=80))


def test_hosts_that_are_alike_are_one_table() -> None:
    rows = {f"n{index:02}": host(f"n{index:02}", free=90 - index) for index in range(1, 17)}
    assert bare(many_lines(rows, width=80)) == (
        "all 16 hosts\n"
        "host      system  Debian 12\n"
        "disk      free    74 GiB (n16) to 89 GiB (n01)\n"
        "versions  torch   2.13.0+cu128\n"
        "          driver  570.1\n"
    )


def test_groups_that_differ_have_a_column_each_and_the_odd_one_a_mark() -> None:
    rows = {f"n{index}": host(f"n{index}") for index in range(1, 16)}
    rows |= {"n16": host("n16", torch="2.11.0+cu126"), "old": host("old", torch="2.11.0+cu126", driver="550.9")}
    assert bare(many_lines(rows, width=80)) == (
        "all 17 hosts\n"
        "host  system  Debian 12\n"
        "disk  free    90 GiB\n"
        "\n"
        "what differs\n"
        "                    n[1-15]              n16                  old\n"
        "versions  torch     2.13.0+cu128       ! 2.11.0+cu126       ! 2.11.0+cu126\n"
        "          driver    570.1                570.1              ! 550.9\n"
    )


def test_where_columns_are_too_many_each_value_has_a_line_with_its_hosts() -> None:
    rows = {f"n{index}": host(f"n{index}", driver=f"570.{index % 8}") for index in range(64)}
    rows["n63"] = host("n63", torch="2.11.0", driver="570.7")
    lines = bare(many_lines(rows, width=80)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[5:8] == [
        "versions  torch     2.13.0+cu128                    n[0-62]",
        "                  ! 2.11.0                          n63",
        "          driver  ! 570.0                           n[0,8,16,24,32,40,48,56]",
    ]


def test_names_and_addresses_are_shown_on_request() -> None:
    rows = {name: host(name) for name in ("n1", "n2")}
    lines = bare(many_lines(rows, width=80, own=True)).splitlines()
    assert [line.split() for line in lines[-2:]] == [["n1", "n2"], ["host", "name", "n1", "n2"]]
    assert "!" not in lines[-1]


def test_long_labels_do_not_push_other_sections_aside() -> None:
    rows = [Row("cpu", "cores", "8"), Row("measured", "random 4 KiB reads, 1 at once", "18 k/s")]
    assert bare(host_lines(rows, width=80)) == (
        "cpu       cores  8\n"
        "measured  random 4 KiB reads, 1 at once  18 k/s\n"
    )  # fmt: skip


def verdict(level: str, text: str) -> dict[str, str]:
    return {"level": level, "text": text, "fix": f"mend {text}"}


def test_what_is_wrong_stands_with_its_way_out_and_notes_are_counted() -> None:
    found = [verdict("red", "GPU 3"), verdict("amber", "memlock 64 KiB: RDMA will fail"), verdict("note", "swap")]
    assert bare(verdict_lines(found, width=36, notes=False)) == (
        "red    GPU 3\n"
        "       fix: mend GPU 3\n"
        "amber  memlock 64 KiB: RDMA will\n"
        "       fail\n"
        "       fix: mend memlock 64 KiB:\n"
        "       RDMA will fail\n"
        "1 note: `--all` shows it\n"
    )
    assert bare(verdict_lines(found, width=80, notes=True)).splitlines()[-2:] == [
        "note   swap",
        "       fix: mend swap",
    ]


def test_a_verdict_that_several_hosts_have_stands_once_with_their_names() -> None:
    found = {"n1": [verdict("amber", "shm")], "n2": [verdict("red", "Xid 79"), verdict("amber", "shm")]}
    folded = fold_verdicts(found)
    assert [(one["level"], one["hosts"]) for one in folded] == [("amber", ["n1", "n2"]), ("red", ["n2"])]
    # The worst first.
    assert bare(verdict_lines(folded, width=80, notes=False)) == (
        "red    n2: Xid 79\n"
        "       fix: mend Xid 79\n"
        "amber  n[1-2]: shm\n"
        "       fix: mend shm\n"
    )  # fmt: skip


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_a_terminal_that_can_hold_a_table(width: int) -> None:
    rows = {f"n{index}": host(f"n{index}", torch=f"2.{index % 3}") for index in range(9)}
    lines = bare(many_lines(rows, width=max(width, 40))).splitlines()
    assert all(len(line) <= max(width, 40) for line in lines)
