"""How long a rank waits for others is counted by collective: on threads, and on streams by events nobody waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.runtime.mesh.c10d import GlooCollectives
from dsrun.runtime.mesh.collectives import WaitKind
from dsrun.runtime.mesh.join.groups import join, make_mesh
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.point_to_point.links import Lane
from dsrun.runtime.mesh.wait_times import MOST_UNREAD, Waited, WaitTimes, waited_since
from support.late_collectives import LateWorld
from support.ranks import run_ranks

CPU = torch.device("cpu")


class Recorder:
    """A heartbeat that remembers."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.entered: list[str] = []
        self.longest: list[tuple[str, float, float]] = []
        self.stage_waits: list[float] = []

    def enter(self, collective: str) -> None:
        self.entered.append(collective)

    def leave(self, waited_s: float) -> None:
        self.waited_s += waited_s

    def tell_longest_wait(self, collective: str, waited_s: float, step_s: float) -> None:
        self.longest.append((collective, waited_s, step_s))

    def tell_stage_wait(self, waited_s: float) -> None:
        self.stage_waits.append(waited_s)


class NamesOnly:
    """An observer that remembers what was waited in.

    Args:
        names: list that gets the names.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def enter(self, collective: str, kind: WaitKind) -> None:
        self._names.append(collective)

    def leave(self, waited_s: float) -> None:
        pass


class Stream:
    """A stream whose work takes the time that a test says, and how far the device is on it."""

    def __init__(self) -> None:
        self.enqueued_s = 0.0
        self.reached_s = 0.0
        self.made = 0
        self.is_captured = False

    def event(self) -> Event:
        self.made += 1
        return Event(self)

    def finish(self) -> None:
        self.reached_s = self.enqueued_s


class Event:
    """See `TimingEvent`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at_s = -1.0

    def record(self) -> None:
        self.at_s = self._stream.enqueued_s

    def query(self) -> bool:
        return self._stream.reached_s >= self.at_s

    def elapsed_time(self, end_event: Any) -> float:
        assert end_event.query(), "the device has not come to it, and nobody may wait for that"
        return 1000 * (end_event.at_s - self.at_s)


def on_stream() -> tuple[WaitTimes, Recorder, Stream]:
    told, stream = Recorder(), Stream()
    return WaitTimes(told, make_event=stream.event, is_capturing=lambda: stream.is_captured), told, stream


def wait(waits: WaitTimes, stream: Stream, name: str, seconds: float) -> None:
    """The stream stands still for a collective for so long; the host goes on at once."""
    waits.enter(name, WaitKind.STREAM)
    stream.enqueued_s += seconds
    waits.leave(0.00001)


def read(waits: WaitTimes, host_s: float = 5.0) -> None:
    waits.enter("results of gradient norm", WaitKind.READ)
    waits.leave(host_s)


def test_waits_of_a_thread_are_counted_by_collective_and_told_to_the_heartbeat() -> None:
    told = Recorder()
    waits = WaitTimes(told)
    for name, seconds in (("all_gather of unit 1", 0.5), ("barrier", 0.1), ("all_gather of unit 1", 0.25)):
        waits.enter(name, WaitKind.THREAD)
        waits.leave(seconds)
    assert waits.snapshot() == {"all_gather of unit 1": Waited(2, 0.75), "barrier": Waited(1, 0.1)}
    assert told.entered == ["all_gather of unit 1", "barrier", "all_gather of unit 1"]
    assert told.waited_s == pytest.approx(0.85)


def test_between_two_snapshots_are_the_waits_that_there_were() -> None:
    waits = WaitTimes(Recorder())
    waits.enter("barrier", WaitKind.THREAD)
    waits.leave(1.0)
    before = waits.snapshot()
    for name in ("barrier", "all_gather"):
        waits.enter(name, WaitKind.THREAD)
        waits.leave(0.25)
    assert waited_since(waits.snapshot(), before) == {"barrier": Waited(1, 0.25), "all_gather": Waited(1, 0.25)}
    assert waited_since(before, before) == {}


def test_a_stream_waits_as_long_as_it_stands_still_and_a_read_of_the_host_is_no_wait() -> None:
    waits, told, stream = on_stream()
    stream.enqueued_s += 1.0  # computes
    wait(waits, stream, "reduce_scatter of unit 3", 0.25)
    stream.enqueued_s += 1.0
    assert (waits.snapshot(), told.waited_s, waits.unread) == ({}, 0.0, 1)
    stream.finish()
    read(waits, host_s=2.25)
    assert waits.snapshot() == {"reduce_scatter of unit 3": Waited(1, 0.25)}
    assert (told.waited_s, waits.unread) == (0.25, 0)
    assert told.entered[-1] == "results of gradient norm"


def test_what_has_not_ended_at_a_read_is_counted_at_a_later_one() -> None:
    waits, told, stream = on_stream()
    wait(waits, stream, "first", 0.25)
    stream.finish()
    wait(waits, stream, "second", 0.5)
    read(waits)
    assert (waits.snapshot(), waits.unread) == ({"first": Waited(1, 0.25)}, 1)
    stream.finish()
    read(waits)
    assert waits.snapshot() == {"first": Waited(1, 0.25), "second": Waited(1, 0.5)}
    assert told.waited_s == 0.75


def test_events_are_used_again() -> None:
    waits, _, stream = on_stream()
    for _ in range(50):
        for name in ("all_gather", "reduce_scatter"):
            wait(waits, stream, name, 0.01)
        stream.finish()
        read(waits)
    assert waits.snapshot()["all_gather"].calls == 50
    assert stream.made == 4


def test_waits_that_nobody_reads_take_no_more_than_so_many_events(caplog: pytest.LogCaptureFixture) -> None:
    waits, _, stream = on_stream()
    with caplog.at_level("WARNING"):
        for _ in range(MOST_UNREAD + 10):
            wait(waits, stream, "all_gather", 0.01)
    assert [record.getMessage() for record in caplog.records] == [
        f"{MOST_UNREAD} waits for other ranks are under way on the device: more are not timed"
    ]
    assert (waits.unread, stream.made) == (MOST_UNREAD, 2 * MOST_UNREAD)
    stream.finish()
    read(waits)
    assert waits.snapshot()["all_gather"].calls == MOST_UNREAD
    wait(waits, stream, "all_gather", 0.01)
    assert waits.unread == 1


def test_waits_of_many_micro_steps_are_all_counted_though_the_host_reads_once_a_step() -> None:
    waits, told, stream = on_stream()
    for _ in range(2 * MOST_UNREAD):
        wait(waits, stream, "all_gather", 0.01)
        stream.reached_s = stream.enqueued_s - 1.0  # the device follows a hundred waits behind
    stream.finish()
    read(waits)
    assert waits.snapshot()["all_gather"].calls == 2 * MOST_UNREAD
    assert stream.made <= 2 * MOST_UNREAD
    assert told.waited_s == pytest.approx(0.01 * 2 * MOST_UNREAD), "the heartbeat hears of all of them"


def test_nothing_is_recorded_while_a_stream_is_captured() -> None:
    waits, _, stream = on_stream()
    stream.is_captured = True
    wait(waits, stream, "all_gather", 0.01)
    assert (waits.unread, stream.made) == (0, 0)
    stream.is_captured = False
    wait(waits, stream, "all_gather", 0.01)
    assert waits.unread == 1


def test_a_wait_that_failed_is_not_counted_and_its_name_stays() -> None:
    waits, told, stream = on_stream()
    waits.enter("all_gather", WaitKind.STREAM)  # raises
    wait(waits, stream, "barrier", 0.25)
    stream.finish()
    read(waits)
    assert waits.snapshot() == {"barrier": Waited(1, 0.25)}
    assert told.entered[:2] == ["all_gather", "barrier"]


def test_the_heartbeat_is_told_now_and_then_what_was_waited_in_longest_lately() -> None:
    told, now_s = Recorder(), [0.0]
    waits = WaitTimes(told, clock=lambda: now_s[0])

    def step(seconds: float, **waited: float) -> None:
        now_s[0] += seconds
        for name, waited_s in waited.items():
            waits.enter(name, WaitKind.THREAD)
            waits.leave(waited_s)
        waits.end_step()

    step(30.0, building=29.0)
    for _ in range(4):
        step(0.5, gather=0.1, reduce=0.2)
    assert told.longest == [("reduce", pytest.approx(0.2), pytest.approx(0.5))], "nothing of the first step"
    step(10.0, gather=4.0, reduce=1.0)
    assert told.longest[1:] == [("gather", pytest.approx(4.0), pytest.approx(10.0))]
    step(10.0)
    assert told.longest[2:] == [("", 0.0, pytest.approx(10.0))]


def test_waits_for_ranks_of_other_stages_are_told_together_on_threads_and_streams() -> None:
    told, stream, now_s = Recorder(), Stream(), [0.0]
    waits = WaitTimes(told, make_event=stream.event, is_capturing=lambda: False, clock=lambda: now_s[0])
    between = waits.between_stages()

    def step(seconds: float) -> None:
        now_s[0] += seconds
        waits.enter("reduce_scatter of unit 1", WaitKind.THREAD)
        waits.leave(0.5)
        between.enter("receive of activations for chunk 1 from rank 0", WaitKind.THREAD)
        between.leave(0.25)
        wait(waits, stream, "all_gather of unit 1", 0.5)
        between.enter("all_reduce of gradient norm", WaitKind.STREAM)
        stream.enqueued_s += 0.125
        between.leave(0.0)
        stream.finish()
        read(waits)
        waits.end_step()

    for _ in range(3):
        step(1.5)
    # The second step ends before there is something to tell, and counts with the third.
    assert told.stage_waits == [pytest.approx(0.375)]
    assert waits.snapshot()["receive of activations for chunk 1 from rank 0"] == Waited(3, 0.75)


def names_by_observer() -> list[str]:
    told: dict[str, list[str]] = {"any": [], "stages": []}
    any_one, stages = (NamesOnly(names) for names in told.values())
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    mesh = make_mesh(divide(4, {"pipe": 2}), info, device=CPU, observer=any_one, stage_observer=stages)
    for collectives, label in ((mesh.world, "world"), (mesh.pipe, "pipe"), (mesh.batch, "batch")):
        collectives.broadcast(torch.zeros(1), source=0, label=label).wait()
    if mesh.pipe.rank == 0:
        mesh.links.send([torch.zeros(1)], to=1, lane=Lane.ACTIVATIONS, label="values")
    else:
        mesh.links.receive(source=0, lane=Lane.ACTIVATIONS, label="values").wait()
    mesh.world.broadcast(torch.zeros(1), source=0, label="end").wait()
    return [f"{name}: {one}" for name, names in told.items() for one in names]


def test_collectives_over_stages_and_messages_are_observed_apart_from_those_of_one_stage() -> None:
    for rank, found in enumerate(run_ranks(4, names_by_observer)):
        received = [f"stages: receive of values from rank {rank - 2}"] if rank >= 2 else []
        collectives = ["any: broadcast from 0 of batch", "stages: broadcast from 0 of world"]
        assert found == [*collectives, "stages: broadcast from 0 of pipe", *received, "stages: broadcast from 0 of end"]


def test_the_rank_that_the_others_wait_for_waits_least_itself() -> None:
    waits = [WaitTimes(HeartbeatWriter(None)) for _ in range(3)]
    entered = [threading.Event() for _ in range(2)]
    world = LoopbackWorld(3, observers=waits)

    def body(collectives: LoopbackCollectives) -> None:
        if collectives.rank == 2:
            for each in entered:
                assert each.wait(30)
            time.sleep(0.1)  # its own work
        else:
            entered[collectives.rank].set()
        collectives.reduce_scatter(torch.zeros(3), label="unit 3").wait()

    world.run(body)
    seconds = [each.snapshot()["reduce_scatter of unit 3"].seconds for each in waits]
    assert min(seconds[:2]) > 0.09
    assert seconds[2] < 0.09


def _seconds_of(make: Callable[[WaitTimes, RankInfo], Any]) -> float:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    waits = WaitTimes(HeartbeatWriter(None))
    axis = make(waits, info)
    axis.barrier()
    if info.rank == 1:
        time.sleep(0.2)  # its own work
    axis.reduce_scatter(torch.zeros(512), label="unit 3").wait()
    waited = waits.snapshot()["reduce_scatter of unit 3"]
    assert waited.calls <= 2  # with shared memory a second meeting, see [Note: two meetings]
    return waited.seconds


def _over_gloo() -> float:
    group = lambda: dist.group.WORLD  # noqa: E731
    return _seconds_of(lambda waits, _: GlooCollectives(group(), waits, device=CPU))


def _in_shared_memory() -> float:
    return _seconds_of(lambda waits, info: make_mesh(divide(2, {}), info, device=CPU, observer=waits).world)


@pytest.mark.parametrize("body", [_over_gloo, _in_shared_memory])
def test_processes_count_the_seconds_for_which_they_wait_for_a_slow_one(body: Callable[[], float]) -> None:
    zero, one = run_ranks(2, body)
    assert zero > 0.15
    assert one < zero / 2


@pytest.mark.cuda
@pytest.mark.gpu_seconds(2)
def test_on_a_gpu_streams_stand_still_for_the_rank_that_computes_a_fifth_longer() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    waits = [WaitTimes(HeartbeatWriter(None)) for _ in range(3)]
    # Some 20 ms of a GPU, and a fifth more; kernels that sleep take one multiprocessor, so ranks run side by side.
    cycles = 40_000_000
    world = LateWorld(3, device=device, cycles=10_000, observers=waits)

    def body(axis: LoopbackCollectives) -> float:
        buffer = torch.zeros(3 * 256, device=device)
        began_s = time.perf_counter()
        for _ in range(20):
            torch.cuda._sleep(cycles + cycles // 5 * (axis.rank == 2))  # pyright: ignore
            axis.reduce_scatter(buffer, label="unit 3").wait()
            with axis.reading("gradient norm"):
                buffer[0].item()
        return time.perf_counter() - began_s

    took_s = world.run(body)
    waited = [each.snapshot()["reduce_scatter of unit 3"] for each in waits]
    assert [each.calls for each in waited] == [20] * 3
    own_s = [wall_s - each.seconds for wall_s, each in zip(took_s, waited, strict=True)]
    assert 1.1 < own_s[2] / max(own_s[:2]) < 1.3, own_s
    assert waited[2].seconds < min(each.seconds for each in waited[:2]) / 2
