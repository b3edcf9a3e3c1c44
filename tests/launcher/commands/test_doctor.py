"""`dsrun doctor -H` compares hosts as before a job, and says with its exit code whether one would be refused."""

from __future__ import annotations

import json
from pathlib import Path

from support.cli import clean_environment, run_dsrun

ENV = clean_environment(CUDA_VISIBLE_DEVICES="")


def hostfile(folder: Path, count: int = 2) -> str:
    path = folder / "hosts"
    path.write_text("".join(f"n{index + 1} slots=1\n" for index in range(count)))
    return str(path)


def test_hosts_that_are_fit_are_one_line_and_the_exit_code_is_zero(tmp_path: Path) -> None:
    words = ["doctor", "-H", hostfile(tmp_path, 1), "--transport", "local"]
    done = run_dsrun(*words, cwd=tmp_path, env=ENV)
    assert done.exit_code == 0, done
    assert done.stdout.startswith("preflight: 1 host fit")


def test_what_is_wrong_is_a_table_and_the_exit_code_is_75(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    words = ["doctor", "-H", hostfile(tmp_path, 3), "--transport", "local", "--iface", "none-such", "-e", "n3"]
    done = run_dsrun(*words, "--workdir", "gone", cwd=tmp_path, env=ENV)
    assert done.exit_code == 75, done
    lines = done.stdout.splitlines()
    assert lines[0].startswith("preflight: 2 problems on 2 of 2 hosts, in ")
    assert f"red    folder   both hosts: {gone}: no such file or directory" in lines
    assert "red    network  host n1: `--iface none-such`: no interface of that name has an address" in lines


def test_the_json_form_is_one_object(tmp_path: Path) -> None:
    words = ["doctor", "-H", hostfile(tmp_path), "--transport", "local", "--iface", "lo", "--json"]
    done = run_dsrun(*words, cwd=tmp_path, env=ENV)
    value = json.loads(done.stdout)
    assert (done.exit_code, value["ok"]) == (0, True)
    interfaces = {"n1": "lo", "n2": "lo"}
    assert value["meeting"] == {"address": "127.0.0.1", "interfaces": interfaces, "rails": {}, "reason": ""}
    assert [host["name"] for host in value["hosts"]] == ["n1", "n2"]


def test_a_hostfile_that_is_missing_is_no_check_of_this_machine(tmp_path: Path) -> None:
    done = run_dsrun("doctor", "-H", "none-such", cwd=tmp_path, env=ENV)
    assert done.exit_code == 2
    assert "none-such: the hostfile cannot be read" in done.stderr
