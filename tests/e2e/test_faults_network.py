"""Fault matrix, parts A and E: what befalls the network between the hosts of a job, and who else is on it.

Rows by their number in the matrix. Every job is held against the oracle on this machine and on each host, also on those
that cannot be reached: see `launched_on_hosts`. With 30 % loss it takes its time: see scripts/soak --hosts 2 --exits 5.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.bad_networks import far_away, loss, narrow
from support.faults import HARD_LIMIT_S, Bound, Gate
from support.faults_training import TRAIN, UNDISTURBED, losses_said, undisturbed_losses
from support.many_hosts import launched_on_hosts, left_on
from support.namespaces import NetHost, Rig, hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
    pytest.mark.timeout(HARD_LIMIT_S + 60),
]

#: The lease, and a moment for the front end to knock once more.
CUT_OFF = Bound(20, 70)
#: The hang's time-out, and what takes the stacks.
HUNG = Bound(20, 80)
#: No false hang may be seen on a slow network.
ON_HANG = ("--hang-timeout", "60s", "--on-hang", "stop")
#: Waits before its fourth step until the test lets it go on; says where the ranks have met.
PAUSES = TRAIN.replace(
    "CRASH",
    """if step == 3:
        sys.stdout.write(f"store {os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}\\n")
        sys.stdout.write(f"ready {os.getpid()}\\n")
        sys.stdout.flush()
        open(sys.argv[2], "rb", 0).read(1)""",
)
#: Trains for ever.
GOES_ON = TRAIN.replace("while engine.global_steps <", "while -1 <").replace(
    "CRASH",
    """if step == 3:
        sys.stdout.write(f"ready {os.getpid()}\\n")
        sys.stdout.flush()""",
)

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
def gate(work: Path) -> Generator[Gate]:
    """Where ranks wait until the test lets them through."""
    gate = Gate(work / "gate")
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def expected() -> dict[int, list[float]]:
    """The losses on a network that nothing befalls."""
    return undisturbed_losses()


@contextmanager
def cut_off(rig: Rig, host: NetHost) -> Generator[None]:
    """Nothing reaches the host, and nothing that it sends reaches anybody."""
    others = [rig.front, *(other for other in rig.hosts if other is not host)]
    with ExitStack() as stack:
        for other in others:
            rig.partition(host, other)
            stack.callback(rig.heal, host, other)
        yield


# partitions


@pytest.mark.depends_on_speed("the bound CUT_OFF")
def test_A16_of_a_host_that_is_cut_off_for_ever_both_halves_end_and_none_goes_on_training(rig: Rig, work: Path) -> None:
    second = rig.hosts[1]
    with ExitStack() as stack:
        # The oracle looks at both halves before the partition ends.
        job = stack.enter_context(launched_on_hosts(rig, work, GOES_ON, words=["-"]))
        job.wait_ready(2)
        with cut_off(rig, second):
            with CUT_OFF.on("ending"):
                ended = job.end()
            job.gone(grace_s=2)
    assert ended.exit_code == 74, ended.text
    assert ended.errors[0] == "error: host n2: no word from its agent for 15 s"


@pytest.mark.depends_on_speed("the bound HUNG")
def test_A16_ranks_that_cannot_talk_any_more_are_a_hang_though_all_hosts_answer(
    rig: Rig, work: Path, gate: Gate
) -> None:
    first, second = rig.hosts
    words = ["-", gate.path]
    with launched_on_hosts(rig, work, PAUSES, "--hang-timeout", "10s", "--on-hang", "stop", words=words) as job:
        job.wait_ready(2)
        rig.partition(first, second)
        try:
            gate.let_through(2)
            with HUNG.on("ending"):
                ended = job.end()
            job.gone(grace_s=2)
        finally:
            rig.heal(first, second)
    assert ended.exit_code == 76, ended.text
    # Not one step more than the three from before.
    assert sorted(losses_said(ended.out)) == [0, 1, 2]


def test_A17_a_partition_of_3_s_is_survived_with_the_same_losses(
    rig: Rig, work: Path, gate: Gate, expected: dict[int, list[float]]
) -> None:
    with launched_on_hosts(rig, work, PAUSES, *ON_HANG, words=["-", gate.path]) as job:
        job.wait_ready(2)
        with cut_off(rig, rig.hosts[1]):
            gate.let_through(2)
            with pytest.raises(subprocess.TimeoutExpired):
                job.process.wait(3)
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert losses_said(ended.out) == expected


# bad networks


def test_A31_on_a_network_that_loses_one_packet_in_twenty_the_losses_are_the_same(
    rig: Rig, work: Path, expected: dict[int, list[float]]
) -> None:
    with loss(rig.hosts, 5), launched_on_hosts(rig, work, UNDISTURBED, *ON_HANG, words=["-"]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert losses_said(ended.out) == expected


@pytest.mark.soak("A31 with one lost packet in twenty, which waits as long for each")
def test_A31_with_a_megabit_a_second_and_over_a_line_of_200_ms_the_losses_are_the_same(
    rig: Rig, work: Path, expected: dict[int, list[float]]
) -> None:
    with (
        narrow(rig.hosts, "1mbit"),
        far_away(rig, rig.hosts[1], delay_s=0.2, folder=work) as (listed, config),
        launched_on_hosts(rig, work, UNDISTURBED, *ON_HANG, hosts=listed, ssh_config=config, words=["-"]) as job,
    ):
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert losses_said(ended.out) == expected


# strangers

#: On a host of the job, without the job's nonce: takes the place of rank 1, and writes over what it finds by its name.
STRANGER = """
import datetime, sys, torch.distributed as dist
address, port = sys.argv[1:]
wait = datetime.timedelta(seconds=2)
store = dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=wait)
for key in ("dsrun", "dsrun/", "0", "1", "default_pg", "rank_1", "init/", "default_pg/0//1//cpu//0/rank_1"):
    store.set(key, b"stranger")
try:
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=wait)
except RuntimeError as error:
    print("nobody met me")
"""


def test_E3_E4_E5_strangers_find_the_ranks_on_one_network_only_and_change_nothing(
    rig: Rig, work: Path, gate: Gate, expected: dict[int, list[float]]
) -> None:
    first, second = rig.hosts
    before = [left_on(host) for host in rig.hosts]
    with launched_on_hosts(rig, work, PAUSES, *ON_HANG, words=["-", gate.path]) as job:
        job.wait_ready(2)
        found = job.wait_for(r"store (\S+) (\d+)", "stdout")
        address, port = found[1], int(found[2])
        assert address == first.address
        # Whoever listens for this job does so on the chosen network, and nowhere else.
        for host, had in zip(rig.hosts, before, strict=True):
            opened = {line.split()[1].rpartition(":")[0] for line in left_on(host) - had if line.startswith("tcp ")}
            assert opened == {struct.pack("=I", struct.unpack("!I", socket.inet_aton(host.address))[0]).hex().upper()}
        stranger = [*second.enter, sys.executable, "-c", STRANGER, address, str(port)]
        said = subprocess.run(stranger, capture_output=True, text=True, timeout=HARD_LIMIT_S)
        assert said.stdout == "nobody met me\n", said.stderr
        with ExitStack() as stack:
            for data in (os.urandom(4096), b"", struct.pack("<BQ", 0, 1 << 30), b"GET / HTTP/1.0\r\n\r\n"):
                line = stack.enter_context(socket.create_connection((address, port), timeout=HARD_LIMIT_S))
                line.sendall(data)
            gate.let_through(2)
            ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert losses_said(ended.out) == expected
