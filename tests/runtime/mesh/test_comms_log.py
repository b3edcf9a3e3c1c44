"""Calls and bytes are those of the traffic counters, seconds those of the waits, bandwidths those of nccl-tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import dsrun
from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.collectives import Pending, Traffic, WaitKind
from dsrun.runtime.mesh.comms_log import Calls, CommsLog, SizeKey, bus_factor, log_of
from dsrun.runtime.mesh.wait_times import WaitTimes
from support.inside_engine import mesh_of
from support.pipelines import Case, Model, train
from support.ranks import run_ranks


@pytest.fixture
def waits() -> WaitTimes:
    return WaitTimes(HeartbeatWriter(None))


class SlowPending:
    """A collective that is waited for as long as it is told."""

    def __init__(self, waits: WaitTimes, seconds: float) -> None:
        self._waits, self._seconds = waits, seconds

    def wait(self) -> None:
        self._waits.enter("all_reduce of numbers", WaitKind.THREAD)
        self._waits.leave(self._seconds)


class SlowCollectives(AloneCollectives):
    """Collectives of four ranks that are known to wait."""

    def __init__(self, waits: WaitTimes) -> None:
        super().__init__()
        self.size = 4
        self._waits = waits

    def all_reduce(self, buffer_N: torch.Tensor, *, op: str = "sum", label: str = "") -> Pending:
        self.traffic.count("all_reduce", buffer_N)
        return SlowPending(self._waits, 0.5)


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("broadcast", 4, 1.0),
        ("send", 2, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(kind: str, ranks: int, factor: float) -> None:
    assert bus_factor(kind, ranks) == factor


def test_seconds_are_the_waits_of_this_axis_and_size_alone(waits: WaitTimes) -> None:
    log, collectives = CommsLog(waits), SlowCollectives(waits)
    log.follow(collectives, "data")
    for numel in (250, 250, 1000):
        collectives.all_reduce(torch.ones(numel), label="numbers").wait()
    waits.enter("all_gather of another axis", WaitKind.THREAD)
    waits.leave(9.0)
    assert log.calls == {
        SizeKey("all_reduce", "data", 1000): Calls(4, calls=2, nbytes=2000, seconds=1.0),
        SizeKey("all_reduce", "data", 4000): Calls(4, calls=1, nbytes=4000, seconds=0.5),
    }
    # 2000 bytes in 1 s; by hand: 2 (4 - 1) / 4 of that on the bus.
    assert log.calls[SizeKey("all_reduce", "data", 1000)].bus_bandwidth("all_reduce") == 3000.0
    assert log.lines()[2].split() == [
        *("all_reduce", "data", "4", "3.9", "KiB", "1", "3.9", "KiB", "0.500", "s", "500.000", "ms"),
        *("8e-06", "GB/s", "1.2e-05", "GB/s"),
    ]
    assert log.summary()["all_reduce"][1000]["algbw"] == 2000.0


def test_kinds_that_are_not_asked_for_are_left_alone(waits: WaitTimes) -> None:
    log, collectives = CommsLog(waits, kinds=["broadcast"]), SlowCollectives(waits)
    log.follow(collectives, "data")
    collectives.all_reduce(torch.ones(1)).wait()
    assert not log.calls
    collectives.broadcast(torch.ones(2), source=0).wait()
    assert set(log.calls) == {SizeKey("broadcast", "data", 8)}


def test_memory_is_bounded_whatever_sizes_come(waits: WaitTimes) -> None:
    log, collectives = CommsLog(waits), AloneCollectives()
    log.follow(collectives, "data")
    for numel in range(1, 2000):
        collectives.all_reduce(torch.ones(numel)).wait()
    assert len(log.calls) < 80
    assert sum(each.nbytes for each in log.calls.values()) == collectives.traffic.bytes["all_reduce"]


def test_each_call_is_said_with_its_data_and_the_line_that_called(waits: WaitTimes) -> None:
    said: list[str] = []
    log, collectives = CommsLog(waits, say=said.append, names_callers=True), SlowCollectives(waits)
    log.follow(collectives, "data")
    collectives.all_reduce(torch.ones(250), label="numbers").wait()
    call, wait = said
    assert call.startswith(f"dsrun: comms: all_reduce of numbers over data (4 ranks), 1000 B, called in {__file__}:")
    assert wait == "dsrun: comms: all_reduce of numbers: waited 500.000 ms"


def sums(log: CommsLog) -> Traffic:
    found = Traffic(Counter(), Counter())
    for key, counted in log.calls.items():
        found.calls[key.kind] += counted.calls
        found.bytes[key.kind] += counted.nbytes
    return found


def count_steps(stage: int) -> tuple[Traffic, Traffic, bool]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "comms_logger": {"enabled": True},
    }
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    engine, *_ = dsrun.initialize(model=model, config=config)
    log = log_of(mesh_of(engine))
    assert log is not None
    counted, logged = engine.counters(), sums(log)
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
    waited_s = sum(each.seconds for each in log.calls.values())
    return engine.counters().since(counted).collectives, sums(log).since(logged), waited_s > 0


@pytest.mark.parametrize("stage", [1, 3])
def test_calls_and_bytes_are_those_of_the_traffic_counters(stage: int) -> None:
    for traffic, logged, has_waited in run_ranks(2, count_steps, stage):
        assert logged == traffic
        assert traffic.bytes["reduce_scatter"] > 0
        assert has_waited


def count_pipeline_steps() -> tuple[Traffic, Traffic, bool]:
    torch.manual_seed(7)
    case = Case(2, "1f1b", 1, tied=True, more={"comms_logger": {"enabled": True}})
    engine: Any = dsrun.initialize(model=Model(tied=True, dropout=0.0), config=case.config())[0]
    log = log_of(mesh_of(engine))
    assert log is not None
    counted, logged = engine.counters(), sums(log)
    train(engine, 0)
    waited_s = sum(each.seconds for key, each in log.calls.items() if key.kind == "receive")
    return engine.counters().since(counted).collectives, sums(log).since(logged), waited_s > 0


def test_messages_between_stages_and_what_stages_share_are_counted_too() -> None:
    for traffic, logged, has_waited in run_ranks(2, count_pipeline_steps):
        assert logged == traffic
        assert min(traffic.bytes["send"], traffic.bytes["receive"]) > 0
        assert has_waited


def test_a_log_that_nobody_wants_is_in_the_way_of_nothing() -> None:
    engine, *_ = dsrun.initialize(
        model=nn.Linear(2, 2),
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    assert log_of(mesh_of(engine)) is None
    assert not [name for axis in mesh_of(engine).views.values() for name in vars(axis) if name.startswith("all_")]
    engine.destroy()
