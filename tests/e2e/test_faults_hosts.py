"""Fault matrix, parts A and E: what befalls the hosts of a job, their ssh servers, keys and agents, over real ssh.

Rows by their number in the matrix; the network between hosts is in test_faults_network.py. Every job is held against
the oracle on this machine and on each host: see `launched_on_hosts`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsrun.launcher.process_modules import AGENT
from support import traces
from support.faults import HARD_LIMIT_S, PASS_GATE, READY, WAIT, Bound, Ended, Gate
from support.faults_training import STEPS, TRAIN, UNDISTURBED, losses_said, undisturbed_losses
from support.many_hosts import hostfile, launched_on_hosts, pids_of
from support.namespaces import NetHost, Rig, hosts, why_no_hosts
from support.sshd import make_key

_WHY_NOT = why_no_hosts()
pytestmark = [
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
    pytest.mark.timeout(HARD_LIMIT_S + 60),
]

#: From the start of dsrun to its refusal; its own time-out for a server to be there is 8 s.
REFUSED, BLACK_HOLE = Bound(10, 40), Bound(15, 60)
STOP, KILL, LOST = Bound(5, 20), Bound(2, 20), Bound(5, 40)
EXEC = ("--start", "exec")
STAYS = f"{READY}{WAIT}"
#: Would be found in the working folder afterwards.
MUST_NOT_RUN = "open('it-ran', 'w').close()\n"
#: A sum over all ranks, and where they met.
MEETS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", int(total), "at", os.environ["MASTER_ADDR"], "by", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
dist.destroy_process_group()
"""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        yield made


@pytest.fixture
def work(rig: Rig) -> Path:
    """A folder of the test's own that all hosts see."""
    return new_folder(rig)


def new_folder(rig: Rig) -> Path:
    folder = rig.folder / f"work{next(_numbers)}"
    folder.mkdir()
    return folder


@pytest.fixture
def second(rig: Rig) -> NetHost:
    """The host that something befalls; it has rank 1."""
    return rig.hosts[1]


@pytest.fixture(scope="module")
def expected() -> dict[int, list[float]]:
    """The losses where nothing befalls the hosts."""
    return undisturbed_losses()


@contextmanager
def without_sshd(host: NetHost) -> Generator[None]:
    host.sshd.stop()
    try:
        yield
    finally:
        host.sshd.start()


def assert_refused(ended: Ended, *parts: str) -> None:
    """One error says what is wrong with n2, none speaks of n1, and nothing was started."""
    assert (ended.exit_code, ended.out) == (75, []), ended.text
    (error,) = ended.errors
    assert all(part in error for part in ("n2", *parts)), ended.text
    assert "n1" not in error, ended.text


# hosts that are not there, or not as they should be


@pytest.mark.depends_on_speed("the bound REFUSED")
def test_A13_a_host_without_an_ssh_server_is_named_in_10_s_and_nothing_is_started(
    rig: Rig, work: Path, second: NetHost
) -> None:
    with (
        without_sshd(second),
        launched_on_hosts(rig, work, MUST_NOT_RUN, *EXEC) as job,
        REFUSED.on("refusing"),
    ):
        ended = job.end()
    assert_refused(ended, "connection refused")


@pytest.mark.depends_on_speed("the bound BLACK_HOLE")
def test_A14_a_host_that_swallows_everything_is_named_in_15_s(rig: Rig, work: Path, second: NetHost) -> None:
    rig.partition(rig.front, second)
    try:
        # The oracle asks the host without the network.
        with launched_on_hosts(rig, work, MUST_NOT_RUN, *EXEC) as job, BLACK_HOLE.on("refusing"):
            ended = job.end()
    finally:
        rig.heal(rig.front, second)
    assert_refused(ended, "no answer")


@pytest.mark.depends_on_speed("the bound REFUSED")
def test_A15_a_host_that_does_not_take_the_key_is_named_and_nothing_is_asked(
    rig: Rig, work: Path, second: NetHost
) -> None:
    other = work / "other_key"
    make_key(other)
    config = work / "ssh_config"
    lines = rig.ssh_config.read_text().splitlines()
    shared = [line for line in lines if "IdentityFile" not in line]
    keys = zip(rig.hosts, (rig.identity, other), strict=True)
    own = [f"Host {host.name} {host.address}\n    IdentityFile {key}" for host, key in keys]
    config.write_text("\n".join([*own, *shared]) + "\n")
    with launched_on_hosts(rig, work, MUST_NOT_RUN, *EXEC, ssh_config=config) as job, REFUSED.on("refusing"):
        ended = job.end()
    assert_refused(ended, "root")
    assert "assword" not in "".join(ended.out)


@pytest.mark.depends_on_speed("the bound REFUSED")
@pytest.mark.parametrize("transport", ["ssh", "openssh"])
def test_E1_a_changed_host_key_is_refused_before_any_command_also_where_new_ones_are_accepted(
    rig: Rig, work: Path, second: NetHost, transport: str
) -> None:
    known = work / "known_hosts"
    known.write_text(rig.known_hosts.read_text().replace(second.sshd.public_key, make_key(work / "other_key")))
    before = known.read_text()
    config = work / "ssh_config"
    config.write_text(rig.ssh_config.read_text().replace(str(rig.known_hosts), str(known)))
    logins = [logins_of(host) for host in rig.hosts]
    words = (*EXEC, "--transport", transport, "--accept-new-host-keys")
    with launched_on_hosts(rig, work, MUST_NOT_RUN, *words, ssh_config=config) as job, REFUSED.on("refusing"):
        ended = job.end()
    assert_refused(ended, "host key")
    assert known.read_text() == before
    first, now = (logins_of(host) for host in rig.hosts)
    assert (first > logins[0], now) == (True, logins[1])


def logins_of(host: NetHost) -> int:
    """How often somebody has logged in since the server was started."""
    return host.sshd.log.count("Accepted publickey")


@pytest.mark.depends_on_speed("the bound REFUSED")
def test_A19_a_host_with_another_torch_is_refused_with_both_versions(rig: Rig, work: Path) -> None:
    packages = work / "packages"
    (packages / "torch-2.4.0.dist-info").mkdir(parents=True)
    (packages / "torch-2.4.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n")
    python = packages / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    listed = hostfile(rig, more=["", f"python={python}"], name="other-torch")
    with launched_on_hosts(rig, work, MUST_NOT_RUN, *EXEC, hosts=listed) as job, REFUSED.on("refusing"):
        ended = job.end()
    assert (ended.exit_code, ended.out) == (75, []), ended.text
    (error,) = ended.errors
    assert "torch" in error
    assert "2.4.0 on n2" in error


@pytest.mark.depends_on_speed("the bound REFUSED")
def test_A20_a_script_that_a_host_does_not_have_is_told_with_host_and_path(
    rig: Rig, work: Path, second: NetHost
) -> None:
    (work / "work").mkdir()
    # What the second host sees there is an empty folder of its own.
    second.run("mount", "-t", "tmpfs", "tmpfs", str(work / "work"))
    with launched_on_hosts(rig, work, MUST_NOT_RUN, *EXEC) as job, REFUSED.on("refusing"):
        ended = job.end()
    assert_refused(ended, f"{work}/work/train.py", "no such file")


def test_A25_a_host_that_comes_late_is_waited_for(rig: Rig, work: Path, second: NetHost) -> None:
    second.sshd.stop()
    refused = refusals_of(second)
    try:
        with launched_on_hosts(rig, work, "print('ran')\n", *EXEC, "--connect-timeout", "60s") as job:
            deadline_s = time.monotonic() + HARD_LIMIT_S
            # More than once: it was knocked at again.
            while refusals_of(second) < refused + 2:
                assert time.monotonic() < deadline_s, f"nobody knocks\n{job.said()}"
            second.sshd.start()
            ended = job.end()
    finally:
        second.sshd.stop()
        second.sshd.start()
    assert ended.exit_code == 0, ended.text
    assert sorted(ended.out) == ["[n1:0] ran", "[n2:1] ran"]


@pytest.mark.depends_on_speed("a bound of 30 s")
def test_A25_a_host_that_comes_too_late_is_named_when_the_time_is_over(rig: Rig, work: Path, second: NetHost) -> None:
    with (
        without_sshd(second),
        launched_on_hosts(rig, work, MUST_NOT_RUN, *EXEC, "--connect-timeout", "2s") as job,
        Bound(5, 30).on("refusing"),
    ):
        ended = job.end()
    assert_refused(ended, "connection refused")


def refusals_of(host: NetHost) -> int:
    """How many packets a host has refused: segments with RST that it has sent."""
    names, values = (line.split() for line in host.run("grep", "^Tcp:", "/proc/net/snmp").splitlines())
    return int(values[names.index("OutRsts")])


# where ranks meet


@pytest.fixture
def odd_first_host(rig: Rig) -> Generator[None]:
    """The first host's name means the host itself, and it has a network that the other one does not know."""
    first = rig.hosts[0]
    table = rig.folder / "n1/hosts"
    before = table.read_text()
    table.write_text("127.0.0.1 localhost\n127.0.1.1 n1\n")
    first.run("ip", "link", "add", "aaa0", "type", "veth", "peer", "name", "aaa1")
    try:
        for device in ("aaa0", "aaa1"):
            first.run("ip", "link", "set", device, "up")
        first.run("ip", "addr", "add", "10.77.0.1/24", "dev", "aaa0")
        yield
    finally:
        first.run("ip", "link", "del", "aaa0")
        table.write_text(before)


@pytest.mark.usefixtures("odd_first_host")
def test_A23_A24_ranks_meet_where_all_reach_whatever_the_hosts_name_means_and_what_else_it_has(
    rig: Rig, work: Path
) -> None:
    with launched_on_hosts(rig, work, MEETS) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    said = f"sum 3 at {rig.hosts[0].address} by eth0"
    assert sorted(ended.out) == [f"[n1:0] {said}", f"[n2:1] {said}"]


@pytest.mark.depends_on_speed("the bound REFUSED")
@pytest.mark.usefixtures("odd_first_host")
def test_A24_an_interface_that_leads_nowhere_is_refused_with_the_way_out(rig: Rig, work: Path) -> None:
    with launched_on_hosts(rig, work, MUST_NOT_RUN, "--iface", "aaa0") as job, REFUSED.on("refusing"):
        ended = job.end()
    assert (ended.exit_code, ended.out) == (75, []), ended.text
    assert "10.77.0.1 (aaa0): not reached by `n2`" in ended.text
    assert "--iface" in ended.text
    assert "eth0" in ended.text


@pytest.mark.soak("A22 in test_faults_environment.py, on one host")
def test_A22_two_jobs_over_the_same_hosts_at_once_both_finish_with_the_right_losses(
    rig: Rig, expected: dict[int, list[float]]
) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    one, other = (launched_on_hosts(rig, new_folder(rig), UNDISTURBED, words=["-"], env=env) for _ in range(2))
    with one as first, other as second:
        ends = [first.end(), second.end()]
    assert [ended.exit_code for ended in ends] == [0, 0], ends[0].text + ends[1].text
    assert [losses_said(ended.out) for ended in ends] == [expected, expected]


# what is lost while a job runs


@pytest.mark.depends_on_speed("the bound LOST")
@pytest.mark.parametrize(
    ("victim", "told"),
    [
        ("agent", "the agent was killed by SIGKILL"),
        pytest.param(
            *("shell of the login", "the connection to its agent was lost"),
            marks=pytest.mark.soak("the killed connection of row A18"),
        ),
    ],
)
def test_A5_a_killed_agent_of_another_host_fails_the_job_with_its_name(
    rig: Rig, work: Path, second: NetHost, victim: str, told: str
) -> None:
    with launched_on_hosts(rig, work, STAYS, *EXEC) as job:
        job.wait_ready(2)
        # The login's shell runs the line that starts the agent, and stays.
        pids = pids_of(second, AGENT)
        (agent,) = (pid for pid in pids if traces.parent_of(pid) in pids)
        (shell,) = set(pids) - {agent}
        with LOST.on("ending"):
            os.kill(agent if victim == "agent" else shell, signal.SIGKILL)
            ended = job.end()
    assert ended.exit_code == 74, ended.text
    assert ended.errors[0].startswith(f"error: host n2: {told}")


def test_A7_a_killed_front_end_takes_the_ranks_of_every_host_along(rig: Rig, work: Path) -> None:
    with launched_on_hosts(rig, work, STAYS, *EXEC) as job:
        job.wait_ready(2)
        job.process.kill()
        assert job.end().exit_code == -signal.SIGKILL


def test_A18_a_job_goes_on_when_an_ssh_server_ends_but_not_its_connections(
    rig: Rig, work: Path, second: NetHost
) -> None:
    gate = Gate(work / "gate")
    program = f"{READY}{PASS_GATE}print('went on')\n"
    with launched_on_hosts(rig, work, program, *EXEC, words=[gate.path]) as job:
        job.wait_ready(2)
        with without_sshd(second):
            gate.let_through(2)
            ended = job.end()
    gate.close()
    assert ended.exit_code == 0, ended.text
    assert {"[n1:0] went on", "[n2:1] went on"} <= set(ended.out)


@pytest.mark.depends_on_speed("the bound LOST")
def test_A18_a_host_whose_connection_is_killed_is_lost_and_its_ranks_end(rig: Rig, work: Path, second: NetHost) -> None:
    with launched_on_hosts(rig, work, STAYS, *EXEC) as job:
        job.wait_ready(2)
        with LOST.on("ending"):
            second.sshd.cut()
            ended = job.end()
    assert ended.exit_code == 74, ended.text
    assert ended.errors == ["error: host n2: the connection to its agent was lost"]


@pytest.mark.soak("A27 in test_faults_restart.py, and a host that came back empty in test_memory_copies.py")
@pytest.mark.depends_on_speed("rank 0 says the loss of step 4 before rank 1 is found dead")
def test_A27_a_job_whose_rank_on_another_host_is_killed_resumes_with_the_undisturbed_losses(
    rig: Rig, work: Path, expected: dict[int, list[float]]
) -> None:
    crash = "if attempt == 0 and step == 5 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    checkpoints = work / "checkpoints"
    program = TRAIN.replace("CRASH", crash)
    with launched_on_hosts(rig, work, program, "--max-restarts", "1", words=[str(checkpoints)]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert f"[n2:1] attempt 1 from 4 resume {checkpoints}/global_step4" in ended.out
    said = losses_said(ended.out)
    assert {step: set(losses) for step, losses in said.items()} == {s: set(losses) for s, losses in expected.items()}
    assert len(said) == STEPS
    assert len(said[4]) == 2


# how it is stopped

#: Saves what it heard as a checkpoint would be saved, and ends.
SAVES = f"""
import os, signal, sys, threading
heard = threading.Event()
signal.signal(signal.SIGINT, lambda *_: heard.set())
{READY}
heard.wait()
open(f"{{sys.argv[1]}}/saved{{os.environ['RANK']}}", "w").close()
"""


@pytest.mark.depends_on_speed("the bound STOP")
def test_A9_ctrl_c_once_lets_the_ranks_of_every_host_save(rig: Rig, work: Path) -> None:
    with launched_on_hosts(rig, work, SAVES, *EXEC, words=[str(work)], grace_s=30.0) as job:
        job.wait_ready(2)
        with STOP.on("stopping"):
            job.process.send_signal(signal.SIGINT)
            ended = job.end()
    assert (ended.exit_code, ended.errors) == (130, []), ended.text
    assert sorted(path.name for path in work.glob("saved*")) == ["saved0", "saved1"]


@pytest.mark.depends_on_speed("the bound KILL")
def test_A9_ctrl_c_twice_kills_the_ranks_of_every_host_at_once(rig: Rig, work: Path) -> None:
    deaf = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{STAYS}"
    with launched_on_hosts(rig, work, deaf, *EXEC, grace_s=600) as job:
        job.wait_ready(2)
        job.process.send_signal(signal.SIGINT)
        job.wait_for("SIGINT: stopping")
        with KILL.on("killing"):
            job.process.send_signal(signal.SIGINT)
            ended = job.end()
            job.gone()
    assert ended.exit_code == 130, ended.text


# what nobody may see


def test_E6_secrets_travel_to_hosts_in_no_argument_list_log_or_record(rig: Rig, work: Path) -> None:
    passed, filed = (f"{word}-{hashlib.sha256(str(work).encode()).hexdigest()[:20]}" for word in ("passed", "filed"))
    (work / "job.env").write_text(f"API_KEY={filed}\n")
    (work / "job.env").chmod(0o600)
    have = hashlib.sha256(f"{passed} {filed}".encode()).hexdigest()
    program = (
        "import hashlib, os\n"
        "have = f\"{os.environ['HF_TOKEN']} {os.environ['API_KEY']}\"\n"
        f"assert hashlib.sha256(have.encode()).hexdigest() == {have!r}\n{READY}{WAIT}"
    )
    over = threading.Event()
    seen: set[str] = set()

    def look() -> None:
        while not over.is_set():
            for pid in traces.pids():
                line = b" ".join(traces.words_of(pid)).decode(errors="replace")
                seen.update([line] if passed in line or filed in line else [])

    watcher = threading.Thread(target=look)
    words = (*EXEC, "--env", "HF_TOKEN", "--env-file", str(work / "job.env"))
    watcher.start()
    try:
        with launched_on_hosts(rig, work, program, *words, env={"HF_TOKEN": passed}) as job:
            job.wait_ready(2)
            over.set()
            folder = job.folder
            job.process.send_signal(signal.SIGTERM)
            ended = job.end()
    finally:
        over.set()
        watcher.join()
    assert ended.exit_code == 143, ended.text
    assert seen == set()
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert kept, "a job has a record"
    assert [path for path, data in kept.items() if passed.encode() in data or filed.encode() in data] == []
    assert passed not in ended.text
    assert filed not in ended.text
