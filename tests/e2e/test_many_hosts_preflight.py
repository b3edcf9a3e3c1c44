"""Hosts that are not fit for a job, over ssh: every one of them and everything that is wrong is told at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from support.cli import Result, run_dsrun
from support.many_hosts import environment, hostfile, run_on_hosts
from support.namespaces import Rig, hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(3, tmp_path_factory.mktemp("rig")) as made:
        yield made


def doctor(rig: Rig, *words: str, more: Sequence[str] = (), name: str) -> Result:
    path = hostfile(rig, more=more, name=name)
    told = ["doctor", "-H", str(path), "--ssh-config", str(rig.ssh_config), *words]
    return run_dsrun(*told, cwd=rig.folder, env=environment(rig))


def python_with(folder: Path, words: str, *, torch: str | None = None) -> str:
    """An interpreter like ours, but for its options or the torch whose metadata it sees first."""
    folder.mkdir()
    if torch is not None:
        (folder / f"torch-{torch}.dist-info").mkdir()
        (folder / f"torch-{torch}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
        )
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} {words} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_hosts_that_are_alike_are_one_line(rig: Rig) -> None:
    done = doctor(rig, name="alike")
    assert done.exit_code == 0, done
    assert done.stdout.startswith("preflight: 3 hosts alike (torch "), done.stdout
    value = json.loads(doctor(rig, "--json", name="alike").stdout)
    assert value["meeting"]["address"] == rig.hosts[0].address
    assert value["meeting"]["interfaces"] == {"n1": "eth0", "n2": "eth0", "n3": "eth0"}


def test_everything_that_is_wrong_is_told_at_once(rig: Rig) -> None:
    other = python_with(rig.folder / "other", "", torch="2.4.0")
    bare = python_with(rig.folder / "bare", "-I -S")
    rig.hosts[1].run("mount", "-o", "remount,size=64M", "/dev/shm")
    rig.hosts[0].run("mkdir", "/tmp/work")
    try:
        done = doctor(rig, "--workdir", "/tmp/work", more=["", f"python={other}", f"python={bare}"], name="wrong")
    finally:
        rig.hosts[1].run("mount", "-o", "remount,size=50%", "/dev/shm")
    assert done.exit_code == 75, done
    lines = done.stdout.splitlines()
    assert lines[0].startswith("preflight: 3 problems on 2 of 3 hosts, in ")
    told = "\n".join(lines)
    assert f"host      n3: {bare} there cannot import dsrun: No module named 'dsrun'" in told
    assert "folder    n2: /tmp/work: no such file or directory" in told
    assert "on n1, 2.4.0 on n2" in told
    assert "amber  /dev/shm  n2: /dev/shm of 64.0 MiB, small for data loaders" in told
    assert "fix: install dsrun for it, or name another with `python=` in the hostfile" in told


def test_a_job_is_refused_where_its_script_or_folder_is_not_the_same(rig: Rig) -> None:
    folder = rig.folder / "job"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text("raise SystemExit('it must not be started')\n")
    # What the second host sees in that place is a folder of its own, and the third one sees nothing.
    rig.hosts[1].run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    rig.hosts[1].run("cp", "/etc/hostname", str(script))
    rig.hosts[2].run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    done = run_on_hosts(rig, "train.py", cwd=folder, hosts=hostfile(rig))
    assert done.exit_code == 75, done
    assert f"script: n3: {script}: no such file or directory" in done.stderr
    assert f"script: {script}: content " in done.stderr
    assert "it must not be started" not in done.stderr


def test_a_host_that_is_away_is_told_and_nothing_is_started(rig: Rig) -> None:
    folder = rig.folder / "away"
    folder.mkdir()
    (folder / "train.py").write_text("raise SystemExit('it must not be started')\n")
    rig.hosts[1].sshd.stop()
    try:
        done = run_on_hosts(rig, "train.py", cwd=folder, hosts=hostfile(rig))
    finally:
        rig.hosts[1].sshd.start()
    assert done.exit_code == 75, done
    assert "host: n2:" in done.stderr
    assert "connection refused" in done.stderr
    assert "it must not be started" not in done.stderr


def test_two_hosts_that_do_not_reach_each_other_are_told_though_both_reach_the_first(rig: Rig) -> None:
    second, third = rig.hosts[1:]
    rig.partition(second, third)
    try:
        done = doctor(rig, name="cut")
    finally:
        rig.heal(second, third)
    assert done.exit_code == 75, done
    assert f"n3 is not reached by n2 at {third.address} (no answer)" in done.stdout
    assert f"n2 is not reached by n3 at {second.address} (no answer)" in done.stdout
