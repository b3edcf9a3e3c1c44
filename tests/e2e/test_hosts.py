"""`dsrun -H hosts` over hosts with real sshd, from the words on the command line to what appears and what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsrun.as_deepspeed.search_path import SITE
from support.cli import Result, run_dsrun, start_dsrun
from support.many_hosts import environment, hostfile, run_on_hosts, started_on_hosts, words_on_hosts
from support.namespaces import Rig, hosts, why_no_hosts
from support.processes import wait_until_gone

ROOT = Path(__file__).parents[2]
_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(180)]

#: What a rank sees. Bytes that are no text come as surrogate escapes, on every host the same.
SHOW = """
import json, os, socket, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "A", "B")
env = {name: os.environ.get(name) for name in names}
print(json.dumps({"host": socket.gethostname(), "argv": sys.argv[1:], "cwd": os.getcwd(), **env}))
"""
STAY = "import signal; print('up', flush=True); signal.pause()"
ODD_WORDS = [
    b"a b",
    b"'\"",
    b"$HOME",
    b";ls|&",
    b"two\nlines",
    b"",
    b"-n",
    b"\xc3\xa4",
    b"\xff\xfe",
    b"*",
    b"`id`",
    b"~",
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(4, tmp_path_factory.mktemp("rig")) as made:
        yield made


@pytest.fixture
def work(rig: Rig, request: pytest.FixtureRequest) -> Path:
    """A working folder of the test's own that all hosts see."""
    folder = rig.folder / f"work{abs(hash(request.node.name))}"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    return folder


def shown(result: Result) -> dict[int, dict[str, Any]]:
    """What each rank of show.py said, in the order of the ranks."""
    assert result.exit_code == 0, result.stderr
    said = [json.loads(line.partition("] ")[2]) for line in result.stdout.splitlines()]
    return {int(entry["RANK"]): entry for entry in sorted(said, key=lambda entry: int(entry["RANK"]))}


def job_folders(rig: Rig) -> list[Path]:
    jobs = rig.folder / "state/dsrun/jobs"
    return sorted(jobs.iterdir()) if jobs.exists() else []


# what arrives


@pytest.mark.parametrize("transport", ["ssh", "openssh"])
def test_words_variables_and_folder_arrive_byte_for_byte(rig: Rig, work: Path, transport: str) -> None:
    odd = work / os.fsdecode(b"it's $HOME;\xff \xc3\xa4\n")
    odd.mkdir()
    (odd / "show.py").write_text(SHOW)
    value = b"'\"$HOME `id` \\ two\nlines \xff=\xc3\xa4"
    said = shown(
        run_on_hosts(
            rig,
            *("--nodes", "2", "--transport", transport, "--start", "exec", "--env", b"A=" + value, "--env", "B="),
            *("show.py", *ODD_WORDS),
            cwd=odd,
        )
    )
    assert [said[rank]["host"] for rank in (0, 1)] == ["n1", "n2"]
    for entry in said.values():
        assert entry["argv"] == [os.fsdecode(word) for word in ODD_WORDS]
        assert (entry["A"], entry["B"]) == (os.fsdecode(value), "")
        assert entry["cwd"] == str(odd)


def test_scripts_written_for_deepspeed_find_dsrun_on_every_host_whatever_was_wished_for_here(
    rig: Rig, work: Path
) -> None:
    script = "import deepspeed, importlib.metadata as m\n"
    script += "print(deepspeed.__version__, m.version('deepspeed'), deepspeed.__file__)\n"
    (work / "which.py").write_text(script)
    words = ("--nodes", "2", "--env", f"XDG_STATE_HOME={work}", "--as-deepspeed", "which.py")
    result = run_on_hosts(rig, *words, cwd=work, DSRUN_AS_DEEPSPEED_VERSION="0.17.5")
    file = f"{SITE}/deepspeed/__init__.py"
    assert sorted(result.stdout.splitlines()) == [f"[{tag}] 0.17.5 0.17.5 {file}" for tag in ("n1:0", "n2:1")]


def test_ranks_are_numbered_host_by_host_on_uneven_hosts(rig: Rig, work: Path) -> None:
    listed = hostfile(rig, slots=[2, 1, 3, 1], more=["env.A=first", "", "env.A=third env.B=own", ""], name="uneven")
    said = shown(run_on_hosts(rig, "--start", "exec", "--env", "B=all", "show.py", cwd=work, hosts=listed))
    numbers = ("host", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE", "A", "B")
    assert [tuple(entry[name] for name in numbers) for entry in said.values()] == [
        ("n1", "0", "2", "0", "7", "first", "all"),
        ("n1", "1", "2", "0", "7", "first", "all"),
        ("n2", "0", "1", "1", "7", None, "all"),
        ("n3", "0", "3", "2", "7", "third", "own"),
        ("n3", "1", "3", "2", "7", "third", "own"),
        ("n3", "2", "3", "2", "7", "third", "own"),
        ("n4", "0", "1", "3", "7", None, "all"),
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--include", "n2:1@n4"], [("n2", "1"), ("n4", "0,1"), ("n4", "0,1")]),
        (["--num_nodes", "2", "--num_gpus", "1"], [("n1", None), ("n2", None)]),
    ],
)
def test_filters_choose_hosts_and_their_gpus(
    rig: Rig, work: Path, words: list[str], expected: list[tuple[str, str | None]]
) -> None:
    said = shown(run_on_hosts(rig, *words, "--start", "exec", "show.py", cwd=work, hosts=hostfile(rig, slots=2)))
    assert [(entry["host"], entry["CUDA_VISIBLE_DEVICES"]) for entry in said.values()] == expected


def test_this_machine_takes_part_by_its_name_and_needs_no_login(rig: Rig, work: Path) -> None:
    listed = rig.folder / "mixed"
    listed.write_text("localhost slots=1 env.A=mine\n" + hostfile(rig).read_text())
    said = shown(run_on_hosts(rig, "--nodes", "2", "--start", "exec", "show.py", cwd=work, hosts=listed))
    # Only this machine inherits what dsrun was started in.
    seen = [(entry["host"], entry["A"], entry["CUDA_VISIBLE_DEVICES"]) for entry in said.values()]
    assert seen == [(socket.gethostname(), "mine", ""), ("n1", None, None)]


def test_hosts_may_come_from_stdin_and_such_a_job_is_not_run_again(rig: Rig, work: Path) -> None:
    text = hostfile(rig).read_bytes()
    words = ["-H", "-", "--nodes", "1", "--ssh-config", str(rig.ssh_config), "--start", "exec", "show.py"]
    with start_dsrun(*words, cwd=work, env=environment(rig), stdin=subprocess.PIPE) as process:
        out, err = process.communicate(text, timeout=60)
    assert (process.returncode, json.loads(out.partition(b"] ")[2])["host"]) == (0, "n1"), err
    again = run_dsrun("rerun", "last", cwd=work, env=environment(rig))
    assert again.exit_code == 2
    assert "its hosts came from <stdin>" in again.stderr


# training


def losses(result: Result, logs: Path) -> list[float]:
    """Of every step."""
    assert result.exit_code == 0, result.stderr
    (records,) = logs.glob("*/records.jsonl")
    events = [json.loads(line) for line in records.read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.soak("test_hosts_share_memory.py, to the bits of one host")
def test_two_hosts_train_as_one_does(rig: Rig, work: Path) -> None:
    config = json.loads((ROOT / "configs/zero3.json").read_text()) | {"train_micro_batch_size_per_gpu": 2}
    (work / "ds.json").write_text(json.dumps(config))
    (work / "text.txt").write_bytes(Path(subprocess.__file__).read_bytes()[:40_000])
    small = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "16", "--batch", "24", "--steps", "4"]
    words = [str(ROOT / "scripts/examples/gpt.py"), "--config", "ds.json", "--data", "text.txt", *small]
    # One thread a rank, so that sums inside a matrix product have one order.
    here = ("-n", "2", "--log-dir", str(work / "one"), "--env", "OMP_NUM_THREADS=1", *words)
    expected = losses(run_dsrun(*here, cwd=work, env=environment(rig), timeout_s=120), work / "one")
    there = ("--nodes", "2", "--log-dir", str(work / "two"), "--env", "OMP_NUM_THREADS=1", *words)
    assert losses(run_on_hosts(rig, *there, cwd=work, timeout_s=120), work / "two") == expected
    assert len(expected) == 4


def test_the_folder_is_brought_to_hosts_that_do_not_have_it(rig: Rig, tmp_path: Path) -> None:
    # Hosts have a /tmp of their own.
    (tmp_path / "show.py").write_text("import word; " + SHOW)
    (tmp_path / "word.py").write_text("")
    words = ("--nodes", "2", "--sync", "--workdir", "/tmp/copied", "--start", "exec", "show.py")
    try:
        result = run_on_hosts(rig, *words, cwd=tmp_path)
        assert [(entry["host"], entry["cwd"]) for entry in shown(result).values()] == [
            ("n1", "/tmp/copied"),
            ("n2", "/tmp/copied"),
        ]
    finally:
        left = Path("/tmp/copied").exists()
    assert not left, "this machine is no host of the job"
    assert "sync: n1, n2: 2 files" in result.stderr
    assert "sync: n1, n2: nothing to send" in run_on_hosts(rig, *words, cwd=tmp_path).stderr


def test_one_dsrun_on_each_node_makes_one_job(rig: Rig, work: Path) -> None:
    (work / "sum.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([float(dist.get_rank() + 1)])\n"
        "dist.all_reduce(total)\n"
        "print(os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'], int(total), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    # A host of the rig has all ports for itself.
    meet = ("--nodes", "2", "--master-addr", rig.hosts[0].address, "--master-port", "29500", "--iface", "eth0")

    def command(rank: int) -> list[str]:
        words = [
            *rig.hosts[rank].enter,
            "env",
            "-C",
            str(work),
            sys.executable,
            "-m",
            "dsrun",
            *meet,
            "--node-rank",
            str(rank),
        ]
        return [*words, "-n", "2", "--log-dir", str(work / f"logs{rank}"), "sum.py"]

    with subprocess.Popen(
        command(1), cwd=work, env=environment(rig), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as other:
        done = subprocess.run(command(0), cwd=work, env=environment(rig), capture_output=True, text=True, timeout=90)
        out, err = other.communicate(timeout=60)
    assert (done.returncode, other.returncode) == (0, 0), done.stderr + err
    assert sorted(done.stdout.splitlines()) == ["[0] 0 0 10", "[1] 1 0 10"]
    assert sorted(out.splitlines()) == ["[2] 0 1 10", "[3] 1 1 10"]


# what is refused, and leaves nothing


def refused(rig: Rig, result: Result, before: Sequence[Path]) -> list[str]:
    """The lines of a refusal by the hosts; nothing may be left of the job."""
    assert (result.exit_code, result.stdout) == (75, ""), result.stderr
    assert job_folders(rig) == list(before)
    return result.stderr.splitlines()


def test_all_hosts_that_cannot_be_reached_are_named_at_once(rig: Rig, work: Path) -> None:
    before = job_folders(rig)
    for index in (1, 3):
        rig.hosts[index].sshd.stop()
    try:
        lines = refused(rig, run_on_hosts(rig, "show.py", cwd=work), before)
    finally:
        for index in (1, 3):
            rig.hosts[index].sshd.start()
    assert lines[0] == "dsrun: reaching 4 hosts"
    errors = "\n".join(line for line in lines if line.startswith("error: "))
    assert "n2" in errors
    assert "n4" in errors
    assert "connection refused" in errors
    assert "n1" not in errors


@pytest.mark.parametrize("how", [[], ["-d"]])
def test_a_folder_that_hosts_do_not_have_is_told_before_anything_starts(
    rig: Rig, tmp_path: Path, how: list[str]
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    before = job_folders(rig)
    lines = refused(rig, run_on_hosts(rig, *how, "--nodes", "2", "show.py", cwd=tmp_path), before)
    assert any(str(tmp_path) in line and line.startswith("error: ") for line in lines), lines


@pytest.mark.parametrize("transport", ["ssh", "openssh"])
def test_a_host_that_nobody_knows_is_refused_until_it_is_accepted_aloud(rig: Rig, work: Path, transport: str) -> None:
    known = work / "known_hosts"
    first, *rest = rig.known_hosts.read_text().splitlines(keepends=True)
    own = [line for line in rest if rig.hosts[0].address6 is None or not line.startswith(rig.hosts[0].address6)]
    known.write_text("".join(own))
    config = work / "ssh_config"
    config.write_text(rig.ssh_config.read_text().replace(str(rig.known_hosts), str(known)))
    words = ["-H", str(hostfile(rig)), "--nodes", "2", "--ssh-config", str(config), "--transport", transport]
    words += ["--start", "exec"]
    before = job_folders(rig)
    lines = refused(rig, run_dsrun(*words, "show.py", cwd=work, env=environment(rig)), before)
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert "n1" in error
    assert "host key" in error
    assert known.read_text() == "".join(own)
    accepted = run_dsrun(*words, "--accept-new-host-keys", "show.py", cwd=work, env=environment(rig))
    assert len(shown(accepted)) == 2
    (told,) = [line for line in accepted.stderr.splitlines() if "host key" in line or "Permanently added" in line]
    assert told.startswith("dsrun: host n1: ")
    assert first.split()[2] in known.read_text()


# stopping, and jobs in the background


def test_ctrl_c_while_hosts_are_reached_ends_at_once(rig: Rig, work: Path) -> None:
    rig.partition(rig.front, rig.hosts[1])
    try:
        words = ("--nodes", "2", "--connect-timeout", "100s", "show.py")
        with started_on_hosts(rig, *words, cwd=work) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == b"dsrun: reaching 2 hosts\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
            told = process.stderr.read().decode()
    finally:
        rig.heal(rig.front, rig.hosts[1])
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith("dsrun: job "), told


def test_a_job_over_two_hosts_is_left_found_followed_and_stopped(rig: Rig, work: Path) -> None:
    (work / "stay.py").write_text(STAY)
    words = words_on_hosts(rig, "--nodes", "2", "-d", "--start", "exec", "stay.py")
    started = run_dsrun("run", *words, cwd=work, env=environment(rig))
    assert started.exit_code == 0, started.stderr
    job = started.stdout.strip()

    def ask(*args: str) -> str:
        result = run_dsrun(*args, cwd=work, env=environment(rig))
        assert result.exit_code == 0, result.stderr
        return result.stdout

    with start_dsrun("logs", job, "-f", cwd=work, env=environment(rig)) as following:
        assert following.stdout is not None
        assert {following.stdout.readline() for _ in range(2)} == {b"[n1:0] up\n", b"[n2:1] up\n"}
        assert "2" in next(line for line in ask("ps").splitlines() if job in line)
        shown_job = ask("show", job)
        assert "0 on n1" in shown_job
        assert "1 on n2" in shown_job
        assert "by ssh" in shown_job
        assert " on n2 (" in ask("rerun", "--dry-run", job)
        ask("stop", job)
        following.communicate(timeout=30)
    assert wait_until_gone(job, timeout_s=20) == []
    outcome = json.loads(ask("show", job, "--json"))["outcome"]
    assert (outcome["outcome"], outcome["hosts"]) == ("stopped", ["n1", "n2"])


def test_a_failing_rank_of_another_host_is_named_with_it_and_its_code_kept(rig: Rig, work: Path) -> None:
    (work / "fail.py").write_text(
        "import os, sys, signal\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit('no data here') if len(sys.argv) == 1 else sys.exit(42)\n"
        "signal.pause()\n"
    )
    result = run_on_hosts(rig, "--nodes", "2", "--start", "exec", "--json", "fail.py", "x", cwd=work)
    assert result.exit_code == 42
    assert "error: rank 1 on n2 (pid " in result.stderr
    outcome = json.loads(result.stdout)
    assert [(rank["rank"], rank["host"]) for rank in outcome["ranks"]] == [(0, "n1"), (1, "n2")]
    assert wait_until_gone(outcome["job_id"], timeout_s=20) == []
