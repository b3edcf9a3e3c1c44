"""`dsrun nvme bench` on a real folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.cli import clean_environment, invoke

QUICK = ("--size", "0.01", "--seconds", "0.01")


def test_a_table_and_the_section_to_paste_are_printed(tmp_path: Path) -> None:
    shown = invoke("nvme", "bench", *QUICK, str(tmp_path))
    assert (shown.exit_code, shown.stderr) == (0, "dsrun: measuring for about 10 ms\n")
    table, pasted = shown.stdout.split('\n"aio": ')
    assert table.splitlines()[0] == f"{tmp_path}: 10.0 MiB"
    assert sorted(json.loads(pasted)) == [
        *("block_size", "intra_op_parallelism", "overlap_events", "queue_depth", "single_submit")
    ]
    assert os.listdir(tmp_path) == []


def test_json_is_one_object(tmp_path: Path) -> None:
    body = json.loads(invoke("nvme", "bench", "--json", *QUICK, str(tmp_path)).stdout)
    assert (body["paths"], len(body["trials"])) == ([str(tmp_path)], 13)


def test_a_folder_that_is_not_there_ends_with_1_and_its_name(tmp_path: Path) -> None:
    shown = invoke("nvme", "bench", str(tmp_path / "no"))
    assert shown.exit_code == 1
    assert "no: cannot be measured: No such file or directory\nhint: name a folder you may write to" in shown.stderr


def test_it_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; from support.cli import invoke; "
        "assert invoke('nvme', 'bench', '--size', '0.01', '--seconds', '0.01', sys.argv[1]).exit_code == 0; "
        "print({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules))"
    )
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=clean_environment(PYTHONPATH=tests),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "set()\n"
