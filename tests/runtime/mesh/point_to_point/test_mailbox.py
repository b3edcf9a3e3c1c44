"""Messages through shared memory: used again once nothing refers to it and never before, and a peer that is gone."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.errors import ModelError
from dsrun.runtime.mesh.collectives import WaitKind
from dsrun.runtime.mesh.join.groups import join, make_mesh
from dsrun.runtime.mesh.point_to_point.links import Lane
from dsrun.runtime.mesh.point_to_point.mailbox import MailboxPointToPoint
from dsrun.runtime.mesh.step_position import Where
from support.ranks import run_ranks

CPU = torch.device("cpu")
LANE = Lane.ACTIVATIONS


class Waits:
    """Notes names of waits, and the one that has not ended."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open = ""

    def enter(self, collective: str, kind: WaitKind) -> None:
        assert kind is WaitKind.THREAD
        self.names.append(collective)
        self.open = collective

    def leave(self, waited_s: float) -> None:
        assert waited_s >= 0
        self.open = ""


def links_with(*, timeout_s: float = 30.0, observer: Waits | None = None) -> MailboxPointToPoint:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30.0)
    make_mesh(divide(info.world_size, {}), info, device=CPU)
    world = dist.group.WORLD
    assert world is not None
    where = Where()
    where.at(3, 1)
    return MailboxPointToPoint(world, observer, timeout_s=timeout_s, where=where)


def steps() -> list[int]:
    """Each step sends eight messages ahead and gets eight back, of three sizes; returns the bytes after each."""
    links = links_with()
    other = 1 - links.rank
    found: list[int] = []
    for _ in range(5):
        for lane in Lane:
            for number in range(8):
                links.send([torch.ones(100_000 >> number % 3)], to=other, lane=lane)
            saved = [links.receive(source=other, lane=lane).wait().tensors[0].view(-1) for _ in range(8)]
            assert all(bool(each.eq(1).all()) for each in saved)
            del saved
            dist.barrier()  # both have let go
        found.append(links.shared_bytes)
    links.close()
    return found


def test_after_the_first_step_memory_is_used_again_and_does_not_grow() -> None:
    for found in run_ranks(2, steps):
        assert found == [found[0]] * 5
        # Eight in flight of 200 to 400 KB in each lane; the second lane finds the first one's.
        assert 1_866_000 < found[0] < 2 * 1_866_000


def keep_and_let_go() -> list[int]:
    """Rank 1 keeps parts of messages in several ways; rank 0 sends into what was let go of."""
    links = links_with()
    other = 1 - links.rank
    if links.rank == 0:
        sizes: list[int] = []
        for number in range(6):
            links.send([torch.full((50_000,), float(number)), torch.ones(2)], to=1, lane=LANE)
            links.receive(source=1, lane=LANE).wait()
            sizes.append(links.shared_bytes)
        links.close()
        return sizes

    def receive() -> tuple[torch.Tensor, ...]:
        return links.receive(source=other, lane=LANE).wait().tensors

    def go_on() -> None:
        gc.collect()
        links.send([], to=other, lane=LANE)

    small = receive()[1]  # one tensor of the message keeps it
    go_on()
    view = receive()[0][10:20]  # so does a view
    go_on()
    weight = torch.ones(50_000, requires_grad=True)
    product = receive()[0] * weight  # so does the graph
    go_on()
    assert small.eq(1).all()
    assert view.eq(1).all()
    fourth = receive()[0]
    assert fourth.eq(3).all()
    del small
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(2).all()
    del product
    go_on()
    fifth = receive()[0]  # in memory that was let go of
    go_on()
    dropping = [fifth, fourth]
    del fifth, fourth
    thread = threading.Thread(target=dropping.clear)  # whichever thread lets go of it
    thread.start()
    thread.join()
    receive()
    go_on()
    assert view.eq(1).all()
    links.close()
    return []


def test_memory_stays_the_receivers_until_nothing_refers_to_it() -> None:
    sizes, _ = run_ranks(2, keep_and_let_go)
    block = 200_000
    grown = [after - before for before, after in pairwise(sizes)]
    assert grown[0] > block, "a tensor of the first message was kept"
    assert grown[1] > block, "a view of the second one was kept"
    assert grown[2] > block, "the graph kept the third one"
    assert grown[3:] == [0, 0], "the first and the third one were let go of"


def forks_free_nothing() -> bool:
    """A copy of the process ends, with its copies of the tensors; the memory stays the receiver's."""
    links = links_with()
    if links.rank == 0:
        for number in range(3):
            links.send([torch.full((1000,), float(number))], to=1, lane=LANE)
            links.receive(source=1, lane=LANE).wait()
        return True
    kept = links.receive(source=0, lane=LANE).wait().tensors[0]
    child = os.fork()
    if child == 0:
        del kept
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(2):
        links.send([], to=0, lane=LANE)
        links.receive(source=0, lane=LANE).wait()
    links.send([], to=0, lane=LANE)
    return bool(kept.eq(0).all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_that_ends_frees_nothing() -> None:
    assert run_ranks(2, forks_free_nothing) == [True, True]


def wait_for_one_that_dies(path: str) -> str:
    observer = Waits()
    links = links_with(observer=observer)
    if links.rank == 1:
        links.send([torch.ones(3)], to=0, lane=LANE)
        while not os.path.exists(path):
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGKILL)
    assert links.receive(source=1, lane=LANE, label="hidden states").wait().tensors[0].eq(1).all()
    began_s = time.monotonic()
    Path(path).touch()
    with pytest.raises(ModelError) as caught:
        links.receive(source=1, lane=Lane.GRADIENTS, label="gradients of micro batch 2").wait()
    assert time.monotonic() - began_s < 10
    assert observer.names == ["receive of hidden states from rank 1", observer.open]
    assert observer.open == "receive of gradients of micro batch 2 from rank 1"
    Path(f"{path}.said").write_text(str(caught.value))
    return ""


@pytest.mark.depends_on_speed("a dead peer is found within a second")
def test_a_peer_that_is_killed_ends_the_wait_and_is_named(tmp_path: Path) -> None:
    with suppress(AssertionError):  # of the rank that dies
        run_ranks(2, wait_for_one_that_dies, str(tmp_path / "go"))
    said = (tmp_path / "go.said").read_text()
    assert said.startswith("rank 0 (0 of 2 along its axis) waited 0")
    assert said.endswith(
        " s in receive of gradients of micro batch 2 from rank 1 (1 along the axis), which has ended, "
        "on the lane of gradients at step 3, micro step 1"
    )


def wait_in_a_circle() -> str:
    links = links_with(timeout_s=0.5 if RankInfo.from_env().rank == 0 else 20.0)
    with pytest.raises(ModelError) as caught:
        links.receive(source=1 - links.rank, lane=LANE, label=f"tensor {links.rank}").wait()
    links.close()
    return str(caught.value)


@pytest.mark.depends_on_speed("a time-out of 0.5 s")
def test_ranks_that_wait_for_each_other_are_told_what_each_waits_for() -> None:
    first, second = run_ranks(2, wait_in_a_circle)
    assert "in receive of tensor 0 from rank 1 (1 along the axis), on the lane of activations" in first
    assert first.endswith("; rank 1 waits in receive of tensor 1 from rank 0 at step 3, micro step 1")
    assert "in receive of tensor 1 from rank 0 (0 along the axis), which left the job" in second


def read_after_the_sender_left() -> list[float]:
    links = links_with()
    if links.rank == 0:
        links.send([torch.arange(3.0)], to=1, lane=LANE)
        links.close()
        links.close()
        dist.barrier()
        return []
    dist.barrier()
    found = links.receive(source=0, lane=LANE).wait().tensors[0]
    links.close()
    return found.tolist()


def test_what_was_sent_before_its_sender_left_is_received() -> None:
    assert run_ranks(2, read_after_the_sender_left)[1] == [0.0, 1.0, 2.0]
