from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dsrun.errors import DsrunError, UsageError
from dsrun.launcher.jobs.queue.leases import ClaimFolder
from dsrun.launcher.jobs.queue.listing import list_queue
from dsrun.launcher.jobs.queue.turn import claim_folders, hold_devices
from dsrun.launcher.machine.devices.choice import Demand, DeviceLease
from dsrun.launcher.machine.proc_files import count_usable_cores
from support.machines import recorded_machine
from support.nvml import GIB, Part, box, made_up_nvml

TWO = Demand(ranks=2, gpus=2)
ONE = Demand(ranks=1, gpus=1)


class Machine:
    """A machine with made-up GPUs on which jobs ask for devices; `said` is what waiting jobs were told."""

    def __init__(self, state: Path, gpus: list[Part]) -> None:
        self.environ = {"XDG_STATE_HOME": str(state)}
        self.gpus = gpus
        self.said: list[str] = []

    def job(
        self,
        name: str,
        demand: Demand,
        *,
        queue: bool = False,
        priority: int = 0,
        share: bool = False,
        waiting: Callable[[], bool] = lambda: False,
        visible: str | None = None,
    ) -> AbstractContextManager[DeviceLease | None]:
        """A job `name`; `waiting` runs between two looks and says whether to go on."""
        return hold_devices(
            demand,
            environ=self.environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
            queue=queue,
            priority=priority,
            share=share,
            job_id=name,
            note=self.said.append,
            keep_waiting=waiting,
            look_every_s=0.0,
            load_nvml=made_up_nvml(*self.gpus),
        )

    def files(self) -> list[str]:
        """Leases and tickets there are."""
        folders = [folder for folder in claim_folders(self.environ) if folder.exists()]
        return sorted(name for folder in folders for name in os.listdir(folder) if not name.startswith("."))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, box(3))


def labels(held: DeviceLease | None) -> tuple[str, ...]:
    assert held is not None
    return held.labels


# one machine


def test_containers_of_one_machine_hold_what_the_other_sees(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "pod-a")
    with machine.job("a", TWO):
        monkeypatch.setattr("socket.gethostname", lambda: "pod-b")
        with machine.job("b", ONE) as b:
            assert labels(b) == ("GPU 2",)
        with pytest.raises(UsageError, match=r"GPUs 0, 1 are held by job a"):
            machine.job("c", Demand(ranks=3, gpus=3)).__enter__()


def test_containers_count_their_slots_for_themselves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Demand(ranks=count_usable_cores(), gpus=0)
    monkeypatch.setattr("socket.gethostname", lambda: "pod-a")
    with machine.job("a", whole) as a:
        with machine.job("b", whole) as b:
            assert (len(labels(a)), labels(b)) == (whole.ranks, ())
        monkeypatch.setattr("socket.gethostname", lambda: "pod-b")
        with machine.job("c", whole) as c:
            assert labels(c) == labels(a)


def test_machines_that_share_a_home_do_not_share_leases(machine: Machine) -> None:
    here, there = (claim_folders(machine.environ, boot=boot) for boot in ("one", "another"))
    assert set(here).isdisjoint(there)


def test_jobs_of_an_earlier_version_keep_their_gpus(machine: Machine) -> None:
    older = ClaimFolder(claim_folders(machine.environ, boot=socket.gethostname())[0])
    with older.deciding():
        older.claim("GPU-0.old", {"job_id": "old", "pid": 7, "device": "GPU-0", "label": "GPU 0", "since_s": 1.0})
    try:
        with machine.job("a", ONE) as a:
            assert labels(a) == ("GPU 1",)
            assert {entry.job_id for entry in list_queue(machine.environ)} == {"old", "a"}
    finally:
        older.drop_all()


# without the queue


def test_two_jobs_get_different_gpus_and_leave_nothing_behind(machine: Machine) -> None:
    with machine.job("a", TWO) as a, machine.job("b", ONE) as b:
        assert (labels(a), labels(b)) == (("GPU 0", "GPU 1"), ("GPU 2",))
        assert a is not None
        assert a.cuda_visible_devices == "GPU-0,GPU-1"
        assert machine.files() == ["GPU-0.a", "GPU-1.a", "GPU-2.b"]
    assert machine.files() == []


def test_a_job_that_finds_too_few_is_told_who_has_them_and_what_to_do(machine: Machine) -> None:
    with machine.job("a", TWO), pytest.raises(UsageError) as caught, machine.job("b", TWO):
        raise AssertionError("started")
    assert caught.value.render() == (
        f"error: 2 GPUs are asked for and 1 is free: GPUs 0, 1 are held by job a (pid {os.getpid()})\n"
        "hint: `--queue` waits, `--share-gpus` takes them all the same, `-n 1` takes what is free, `--backend gloo` "
        "needs none"
    )


def test_gpus_in_use_by_others_are_not_taken(tmp_path: Path) -> None:
    machine = Machine(tmp_path, box(1, g0=[(4_000_000, 5 * GIB)]))
    with pytest.raises(UsageError, match=r"1 GPU is asked for and none is free: GPU 0 is held by pid 4000000"):
        machine.job("a", ONE).__enter__()
    assert machine.files() == []


def test_a_desktop_with_much_of_a_gpu_is_said_and_stops_nothing(tmp_path: Path) -> None:
    driver = recorded_machine("desktop", tmp_path / "root").load_nvml
    said: list[str] = []
    with hold_devices(
        TWO,
        environ={"XDG_STATE_HOME": str(tmp_path)},
        queue=False,
        priority=0,
        share=False,
        job_id="a",
        note=said.append,
        keep_waiting=lambda: False,
        load_nvml=driver,
    ) as held:
        assert labels(held) == ("GPU 0", "GPU 1")
    assert said == ["GPU 0 draws a desktop too, which has 2.3 GiB of its memory"]


def test_jobs_that_share_run_on_what_is_held(machine: Machine) -> None:
    with machine.job("a", Demand(ranks=3, gpus=3)), machine.job("b", TWO, share=True) as b:
        assert len(labels(b)) == 2
        with machine.job("c", Demand(ranks=3, gpus=3), share=True) as c:
            assert len(labels(c)) == 3
            with pytest.raises(UsageError, match=r"job a \(pid \d+\) and job c"):
                machine.job("d", TWO).__enter__()


def test_the_choice_keeps_to_cuda_visible_devices(machine: Machine) -> None:
    with machine.job("a", ONE, visible="2,1") as a, machine.job("b", ONE, visible="2,1") as b:
        assert (labels(a), labels(b)) == (("GPU 2",), ("GPU 1",))
        with pytest.raises(UsageError, match="none is free"):
            machine.job("c", ONE, visible="2,1").__enter__()


def test_chosen_gpus_are_taken_in_the_order_of_the_choice_and_no_others(machine: Machine) -> None:
    with machine.job("a", Demand(ranks=2, gpus=2, chosen=(2, 0))) as a:
        assert a is not None
        assert (a.cuda_visible_devices, a.labels) == ("GPU-2,GPU-0", ("GPU 2", "GPU 0"))
        with pytest.raises(UsageError) as caught:
            machine.job("b", Demand(ranks=2, gpus=2, chosen=(0, 1))).__enter__()
    assert caught.value.render() == (
        f"error: 2 GPUs are asked for and 1 is free: GPU 0 is held by job a (pid {os.getpid()})\n"
        "hint: `--queue` waits, `--share-gpus` takes them all the same, `--backend gloo` needs none"
    )


def test_all_gpus_in_another_order_are_told_to_the_ranks_and_in_theirs_are_not(machine: Machine) -> None:
    with machine.job("a", Demand(ranks=3, gpus=3, chosen=(1, 2, 0))) as a:
        assert a is not None
        assert a.cuda_visible_devices == "GPU-1,GPU-2,GPU-0"
    with machine.job("b", Demand(ranks=3, gpus=3, chosen=(0, 1, 2))) as b:
        assert b is not None
        assert b.cuda_visible_devices is None


def test_chosen_gpus_count_those_that_the_process_sees(machine: Machine) -> None:
    with machine.job("a", Demand(ranks=1, gpus=1, chosen=(0,)), visible="2,1") as a:
        assert labels(a) == ("GPU 2",)
    with pytest.raises(DsrunError, match="3 GPUs are asked for and the driver shows 2 now"):
        machine.job("b", Demand(ranks=1, gpus=1, chosen=(2,)), visible="2,1").__enter__()


def test_no_ranks_here_hold_nothing(machine: Machine) -> None:
    with machine.job("a", Demand(ranks=0, gpus=0), queue=True) as held:
        assert held == DeviceLease()
    assert machine.files() == []


def test_jobs_on_the_cpu_never_wait_and_never_fail(machine: Machine) -> None:
    cores = count_usable_cores()
    with machine.job("a", Demand(ranks=cores, gpus=0)) as a, machine.job("b", Demand(ranks=2, gpus=0)) as b:
        assert (len(labels(a)), labels(b)) == (cores, ())
    with machine.job("c", Demand(ranks=cores + 5, gpus=0), queue=True) as c:
        assert len(labels(c)) == cores


def test_a_state_folder_that_cannot_be_written_stops_no_job_but_the_queue(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine = Machine(tmp_path / "file", box(1))
    with machine.job("a", ONE) as held:
        assert held == DeviceLease()
    (said,) = machine.said
    assert said.startswith("devices are not leased, another job may take them too: ")
    assert said.endswith(": not a directory")
    with pytest.raises(UsageError, match="the queue cannot be kept"):
        machine.job("a", ONE, queue=True).__enter__()


# with it


def test_a_queued_job_starts_at_once_where_all_is_free(machine: Machine) -> None:
    with machine.job("a", TWO, queue=True) as a:
        assert labels(a) == ("GPU 0", "GPU 1")
        assert machine.files() == ["GPU-0.a", "GPU-1.a"]
    assert machine.said == []


def test_a_queued_job_waits_until_the_holder_has_ended(machine: Machine) -> None:
    holder = machine.job("a", TWO)
    holder.__enter__()
    looks: list[int] = []

    def waiting() -> bool:
        looks.append(1)
        if len(looks) == 3:
            holder.__exit__(None, None, None)
        return True

    with machine.job("b", TWO, queue=True, waiting=waiting) as b:
        assert labels(b) == ("GPU 0", "GPU 1")
    assert machine.said == [f"waiting for 2 GPUs: GPUs 0, 1 are held by job a (pid {os.getpid()})"]
    assert len(looks) == 3


def test_a_wait_can_be_ended_and_gives_its_place_up(machine: Machine) -> None:
    with machine.job("a", TWO), machine.job("b", TWO, queue=True) as b:
        assert b is None
    assert machine.files() == []


#: Queues for GPUs, writes its name down once it has them, and holds them until its stdin ends.
QUEUE_UP = """
import os, sys
from pathlib import Path
from dsrun.launcher.machine.devices.choice import Demand
from dsrun.launcher.jobs.queue.turn import hold_devices
from support.machines import recorded_machine
from support.nvml import box, made_up_nvml
name, gpus, priority, book = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
with hold_devices(Demand(ranks=gpus, gpus=gpus), environ=os.environ, queue=True, priority=priority, share=False,
    job_id=name, note=lambda text: print(text, flush=True), keep_waiting=lambda: True, look_every_s=0.02,
    load_nvml=made_up_nvml(*box(3))) as held:
    with book.open("a") as file:
        print(name, *held.labels, file=file)
    print("holds", flush=True)
    sys.stdin.read()
"""


class Queue:
    """Real processes that queue on a machine; each is one job."""

    def __init__(self, machine: Machine, book: Path) -> None:
        self._machine = machine
        self._book = book
        self._jobs: dict[str, subprocess.Popen[str]] = {}

    def enter(self, name: str, gpus: int, priority: int = 0) -> str:
        """Starts a job; returns the first thing it says."""
        tests = str(Path(__file__).parents[3])
        self._jobs[name] = subprocess.Popen(
            [sys.executable, "-c", QUEUE_UP, name, str(gpus), str(priority), str(self._book)],
            env={**os.environ, "PYTHONPATH": tests} | self._machine.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self.hear(name)

    def hear(self, name: str) -> str:
        stdout = self._jobs[name].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def kill(self, name: str) -> None:
        self._jobs[name].kill()
        self._jobs[name].communicate()

    def finish(self) -> list[str]:
        """Lets every job end as soon as it has held its devices; returns what was held, in order."""
        for job in self._jobs.values():
            assert job.stdin is not None
            job.stdin.close()
        for job in self._jobs.values():
            assert job.wait(60) == 0
            assert job.stdout is not None
            job.stdout.close()
        return self._book.read_text().splitlines()


@pytest.fixture
def queue(machine: Machine, tmp_path: Path) -> Queue:
    return Queue(machine, tmp_path / "book")


def test_jobs_are_served_by_priority_and_then_in_order(machine: Machine, queue: Queue) -> None:
    with machine.job("holder", Demand(ranks=3, gpus=3)):
        assert queue.enter("first", 3).endswith(f"held by job holder (pid {os.getpid()})")
        assert queue.enter("second", 3).endswith("; 1 job ahead")
        assert queue.enter("urgent", 3, priority=5).endswith(f"held by job holder (pid {os.getpid()})")
        assert queue.enter("third", 3).endswith("; 3 jobs ahead")
    assert [line.split()[0] for line in queue.finish()] == ["urgent", "first", "second", "third"]


def test_a_small_job_does_not_overtake_a_large_one(machine: Machine, queue: Queue) -> None:
    with machine.job("holder", ONE):
        queue.enter("large", 3)
        assert queue.enter("small", 1).endswith("; 1 job ahead")
    assert [line.split()[0] for line in queue.finish()] == ["large", "small"]


def test_jobs_on_different_gpus_do_not_wait_for_each_other(machine: Machine) -> None:
    def other_starts() -> bool:
        with machine.job("b", ONE, queue=True, visible="1") as b:
            assert labels(b) == ("GPU 1",)
        return False

    with (
        machine.job("holder", ONE, visible="0"),
        machine.job("a", ONE, queue=True, visible="0", waiting=other_starts) as a,
    ):
        assert a is None


def test_the_ticket_of_a_killed_job_holds_nobody_up(machine: Machine, queue: Queue) -> None:
    with machine.job("holder", Demand(ranks=3, gpus=3)):
        queue.enter("killed", 3)
        queue.kill("killed")
    with machine.job("next", TWO, queue=True) as held:
        assert labels(held) == ("GPU 0", "GPU 1")
        assert machine.files() == ["GPU-0.next", "GPU-1.next"]


def test_the_devices_of_a_killed_job_are_free(machine: Machine, queue: Queue) -> None:
    assert queue.enter("killed", 3) == "holds"
    queue.kill("killed")
    with machine.job("next", Demand(ranks=3, gpus=3)) as held:
        assert labels(held) == ("GPU 0", "GPU 1", "GPU 2")
