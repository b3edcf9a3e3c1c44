"""Messages over Gloo: sends wait for nobody and their copies go, and a peer that is gone is named."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dsrun.contract.environment import RankInfo
from dsrun.errors import ModelError
from dsrun.runtime.mesh.join.groups import join
from dsrun.runtime.mesh.point_to_point.c10d import C10dPointToPoint, LaneGroups
from dsrun.runtime.mesh.point_to_point.links import Lane
from support.ranks import run_ranks, wait_for_all

CPU = torch.device("cpu")


def links_with(*, timeout_s: float = 30.0) -> C10dPointToPoint:
    info = RankInfo.from_env()
    wait_for_all(info)
    join(info, backend="gloo", device=CPU, timeout_s=timeout_s)
    return links_among_all(timeout_s)


def links_among_all(timeout_s: float = 30.0) -> C10dPointToPoint:
    world = dist.group.WORLD
    assert world is not None
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) for _ in range(2)]
    return C10dPointToPoint({lane: LaneGroups(group, group) for lane, group in zip(Lane, groups, strict=True)})


def back_and_forth() -> list[int]:
    """Returns the copies that a rank keeps after each round of one message in each direction."""
    links = links_with()
    found: list[int] = []
    for _ in range(50):
        links.send([torch.ones(1000)], to=1 - links.rank, lane=Lane.ACTIVATIONS)
        links.receive(source=1 - links.rank, lane=Lane.ACTIVATIONS).wait()
        found.append(links.unanswered)
    links.close()
    return found


def test_copies_of_messages_go_as_soon_as_answers_say_that_they_were_taken() -> None:
    for found in run_ranks(2, back_and_forth):
        assert max(found) <= 2


def one_way() -> list[int]:
    """Rank 0 sends, and gets no message back; it meets the other elsewhere."""
    links = links_with()
    found: list[int] = []
    for _ in range(12):
        if links.rank == 0:
            for _ in range(32):
                links.send([torch.ones(1000)], to=1, lane=Lane.ACTIVATIONS)
            found.append(links.unanswered)
        else:
            for _ in range(32):
                links.receive(source=0, lane=Lane.ACTIVATIONS).wait()
        dist.barrier()
    links.close()
    return found


def test_copies_of_messages_go_where_nobody_answers() -> None:
    found = run_ranks(2, one_way)[0]
    assert found[:2] == [32, 64]
    assert max(found) <= 96


def ahead() -> list[float]:
    """Rank 0 sends much more than a socket holds before anybody receives; then both send at once."""
    links = links_with()
    count = 100
    if links.rank == 0:
        for number in range(count):
            mine = torch.full((100_000,), float(number))
            links.send([mine], to=1, lane=Lane.ACTIVATIONS, header=b"h" * 1000).wait()
            mine.fill_(-1)
    dist.barrier()
    links.send([torch.full((1_000_000,), -2.0)], to=1 - links.rank, lane=Lane.GRADIENTS).wait()
    found = [float(links.receive(source=1 - links.rank, lane=Lane.GRADIENTS).wait().tensors[0][-1])]
    if links.rank == 1:
        messages = [links.receive(source=0, lane=Lane.ACTIVATIONS).wait() for _ in range(count)]
        assert all(len(message.header) == 1000 for message in messages)
        found.extend(float(message.tensors[0].mean()) for message in messages)
    links.close()
    return found


def test_a_send_waits_for_nobody_and_its_tensors_may_be_overwritten() -> None:
    assert run_ranks(2, ahead) == [[-2.0], [-2.0, *map(float, range(100))]]


def wait_for_one_that_dies(path: str) -> str:
    links = links_with()
    if links.rank == 1:
        links.send([torch.ones(3)], to=0, lane=Lane.GRADIENTS)
        while not os.path.exists(path):
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGKILL)
    assert links.receive(source=1, lane=Lane.GRADIENTS).wait().tensors[0].eq(1).all()
    began_s = time.monotonic()
    Path(path).touch()
    with pytest.raises(ModelError) as caught:
        links.receive(source=1, lane=Lane.GRADIENTS, label="gradients of micro batch 2").wait()
    assert time.monotonic() - began_s < 20
    Path(f"{path}.said").write_text(str(caught.value))
    return ""


@pytest.mark.depends_on_speed("a dead peer is found within a second")
def test_a_peer_that_is_killed_ends_the_wait_and_is_named(tmp_path: Path) -> None:
    with suppress(AssertionError):  # of the rank that dies
        run_ranks(2, wait_for_one_that_dies, str(tmp_path / "go"))
    said = (tmp_path / "go.said").read_text()
    assert said.startswith("rank 0 (0 of 2 along its axis) waited 0")
    assert (
        " s in receive of gradients of micro batch 2 from rank 1 (1 along the axis), on the lane of gradients" in said
    )
    assert "rank 1 says nothing: it has ended" in said


def wait_in_a_circle() -> str:
    links = links_with(timeout_s=1.0)
    with pytest.raises(ModelError) as caught:
        links.receive(source=1 - links.rank, lane=Lane.ACTIVATIONS, label=f"tensor {links.rank}").wait()
    return str(caught.value)


@pytest.mark.depends_on_speed("a time-out of 1 s")
def test_ranks_that_wait_for_each_other_are_told_what_each_waits_for() -> None:
    first, second = run_ranks(2, wait_in_a_circle)
    assert (
        "in receive of tensor 0 from rank 1 (1 along the axis), on the lane of activations; rank 1 waited in" in first
    )
    assert (
        "in receive of tensor 1 from rank 0 (0 along the axis), on the lane of activations; rank 0 waited in" in second
    )


def second_links() -> list[float]:
    """Links are closed with messages taken without an answer, and others made on groups of the same ranks."""
    found: list[float] = []
    for number in range(2):
        links = links_with() if number == 0 else links_among_all()
        if links.rank == 0:
            for each in range(70):
                links.send([torch.tensor(float(each))], to=1, lane=Lane.ACTIVATIONS)
        else:
            found.extend(float(links.receive(source=0, lane=Lane.ACTIVATIONS).wait().tensors[0]) for _ in range(70))
        links.close()
        links.close()
    return found


def test_messages_that_nobody_has_taken_hold_up_the_end_a_little() -> None:
    assert run_ranks(2, second_links) == [[], [*map(float, range(70))] * 2]
