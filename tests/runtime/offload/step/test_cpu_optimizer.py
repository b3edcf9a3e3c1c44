"""The step in host memory goes on behind its caller, unit by unit in forward order, and says where it failed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.errors import OffloadError
from dsrun.runtime.engine.host.update import OffloadedUpdate, forward_order
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.memory.bus import Bus, Event, StreamBus, ThreadBus, bus_for
from dsrun.runtime.memory.host_pool import host_pool_for
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.offload.host_gradients import HostGradients
from dsrun.runtime.offload.states.host_range import HostRange
from dsrun.runtime.offload.states.range_work import BlockStep, RangeWork
from dsrun.runtime.offload.step.cpu_optimizer import CpuOptimizer, share_of_cores
from dsrun.runtime.offload.step.ways import block_step_for
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.precision.policy import BF16, FP32, PrecisionPolicy
from dsrun.runtime.zero.creation.placement import Placement
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.grads.reducer import GradReducer
from dsrun.runtime.zero.units.find import UnitSpec
from dsrun.runtime.zero.units.plan import ZeroPlan

CPU = torch.device("cpu")
#: Three units of different sizes, so that a copy tells by its bytes whose it is.
NUMELS = (1024, 2048, 3072)
DEADLINE_S = 60.0


class Gate:
    """A pace that lets one copy through for each `open`."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self._allowed = threading.Semaphore(0)

    def open(self, copies: int = 1) -> None:
        for _ in range(copies):
            self._allowed.release()

    def __call__(self, nbytes: int) -> None:
        assert self._allowed.acquire(timeout=DEADLINE_S), "nobody has opened the gate"
        self.came.append(nbytes)


@dataclass
class Parts:
    units: list[Any]
    gradients: HostGradients
    host: CpuOptimizer
    update: OffloadedUpdate
    store: Any
    out: Gate
    back: Gate
    memory: Arenas

    def put_gradients(self) -> None:
        """Hands in gradients of ones, as a reduction does; the copies out may pass."""
        self.out.open(len(NUMELS))
        for unit in self.units:
            self.gradients.take(unit.index, torch.ones_like(unit.shard), 1.0, first=True)


def make(
    stage: int = 3,
    precision: PrecisionPolicy = BF16,
    *,
    steps: BlockStep | None = None,
    device: torch.device = CPU,
    bus: Bus | None = None,
    accumulates: bool = False,
) -> Parts:
    plan, alone, memory = ZeroPlan.of_stage(stage), AloneCollectives(), Arenas()
    pool, out, back = host_pool_for(device, pin=True, say=pytest.fail), Gate(), Gate()
    bus = ThreadBus(out_pace=out, back_pace=back) if bus is None else bus
    specs = [
        UnitSpec(f"blocks.{i}", nn.Identity(), ((f"blocks.{i}.w", nn.Parameter(torch.ones(numel))),))
        for i, numel in enumerate(NUMELS)
    ]
    group_of = {id(param): 0 for spec in specs for _, param in spec.params}
    units = build_units(
        specs,
        plan,
        lambda _: alone,
        precision=precision,
        device=device,
        group_of=group_of,
        memory=memory,
        placement=Placement(masters_host=pool),
    )
    gradients = HostGradients(
        [unit.layout.shard_numel for unit in units],
        bus=bus,
        device=device,
        travels=precision.compute,
        accumulates=accumulates,
        factors=[1.0],
        pool=pool,
        memory=memory,
    )
    reducer = GradReducer(
        units,
        alone,
        shard_optimizer=True,
        shard_gradients=plan.shard_gradients,
        sums=gradients,
        memory=memory,
    )
    store = build_store(units, plan, alone, memory=memory)
    optimizer = ShardOptimizer([unit.owned_range(group_of) for unit in units], group_count=1)
    torch_optimizer = optim.SGD(optimizer.shards_by_group()[0], lr=0.25)
    optimizer.drive(torch_optimizer)
    host = CpuOptimizer(
        [HostRange(unit.label, [r for r in optimizer.runs if r.layout is unit.layout], unit.master, unit.shard)
         for unit in units],
        optimizer,
        gradients,
        steps or block_step_for(torch_optimizer),
        order=forward_order(units, ()),
        bus=bus,
        pool=pool,
        memory=memory,
    )  # fmt: skip
    update = OffloadedUpdate(units, plan, reducer, store, host, overlaps=True)
    return Parts(units, gradients, host, update, store, out, back, memory)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
def test_the_next_forward_begins_with_the_first_unit_and_waits_for_no_other(
    stage: int, precision: PrecisionPolicy
) -> None:
    parts = make(stage, precision)
    parts.put_gradients()
    parts.update.begin(1.0)
    assert parts.back.came == [], "the step has returned, and no parameter has arrived"
    # Stage 3 gathers the next unit into another slot while one computes, so it waits for two.
    ahead = 1 if stage == 3 else 0
    for number, unit in enumerate(parts.units):
        parts.back.open(1 + (ahead if number == 0 else 0))
        parts.store.acquire(unit)
        assert bool((unit.params[0] == 0.75).all()), "its own values are there"
        assert len(parts.back.came) <= min(number + 1 + ahead, len(NUMELS)), "of the others, no more than were let go"
        parts.store.release(unit)
    parts.update.settle()
    itemsize = precision.compute.itemsize
    assert parts.back.came == [numel * itemsize for numel in NUMELS], "in forward order"
    parts.update.close()


def test_units_are_stepped_in_the_order_of_the_forward() -> None:
    parts = make()
    parts.host.follow([2, 0, 1])
    parts.put_gradients()
    parts.back.open(3)
    parts.host.begin(1.0)
    parts.host.settle()
    assert parts.back.came == [2 * NUMELS[index] for index in (2, 0, 1)]
    parts.update.close()


def test_the_order_is_the_first_forwards_with_the_rest_before_it() -> None:
    units = make().units
    units[2].module = None
    assert forward_order(units, ()) == [2, 0, 1]
    assert forward_order(units, [units[0], units[1], units[2]]) == [2, 1, 0]


class Failing:
    """Steps one range, and fails at the next."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self, work: RangeWork) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("the host has no such number")


def test_a_failure_surfaces_where_the_update_is_next_wanted_and_names_its_unit() -> None:
    failing = Failing()
    parts = make(steps=failing)
    parts.put_gradients()
    parts.back.open(3)
    parts.host.begin(1.0)
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"unit 1 `blocks.1` in host memory: ArithmeticError: the host has no"):
            parts.update.settle()
    with pytest.raises(OffloadError, match=r"blocks\.1"):
        parts.store.acquire(parts.units[0])
    assert failing.calls <= 3
    with pytest.raises(OffloadError, match=r"blocks\.1"):
        parts.update.close()
    parts.update.close()


def test_gradients_that_left_are_read_edited_and_forgotten() -> None:
    parts = make(2)
    parts.put_gradients()
    gradients, unit = parts.gradients, parts.units[1]
    assert gradients.read(1).dtype == torch.float32
    assert bool((gradients.read(1) == 1).all())
    parts.back.open(1)
    gradients.edit(1).mul_(2)
    assert bool((gradients.read(1) == 2).all())
    norms = gradients.norms()
    assert [float(norm[0]) for norm in norms] == [16.0, 32.0, 16.0]
    parts.out.open(1)
    parts.back.open(3)
    parts.update.begin(1.0)
    parts.update.settle()
    assert bool((unit.master == 0.5).all())
    assert bool((parts.units[0].master == 0.75).all())
    gradients.clear()
    assert not any(bool(norm.any()) for norm in gradients.norms())
    parts.back.open(3)
    parts.update.begin(1.0)
    parts.update.settle()
    assert bool((unit.master == 0.5).all())
    parts.update.close()


def test_padding_stays_zero() -> None:
    parts = make(1)
    parts.put_gradients()
    parts.back.open(3)
    parts.update.begin(1.0)
    parts.update.settle()
    for unit in parts.units:
        numel = sum(extent.numel for extent in unit.layout.extents)
        assert not bool(unit.flat_param[numel:].any())
    parts.update.close()


class MarkedBus(ThreadBus):
    """Notes where marks are set, and which copies begin behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.marked_by: list[str] = []
        self.copies: list[tuple[str, str, Event | None]] = []

    def mark(self) -> Event:
        self.marked_by.append(threading.current_thread().name)
        return super().mark()

    def start_out(self, *args: Any, mark: Event | None = None, **options: Any) -> Event:
        self.copies.append((threading.current_thread().name, options["kind"], mark))
        return super().start_out(*args, mark=mark, **options)

    def start_back(self, *args: Any, mark: Event | None = None, **options: Any) -> Event:
        self.copies.append((threading.current_thread().name, options["kind"], mark))
        return super().start_back(*args, mark=mark, **options)


@pytest.mark.parametrize("accumulates", [False, True])
def test_copies_of_a_step_begin_behind_the_point_where_it_began_and_others_behind_their_own_stream(
    accumulates: bool,
) -> None:
    bus, here = MarkedBus(), threading.current_thread().name
    parts = make(1, bus=bus, accumulates=accumulates)
    for step in range(2):
        parts.put_gradients()
        assert bus.marked_by == [here] * step
        parts.update.begin(1.0)
        parts.update.settle()
    parts.update.close()
    assert bus.marked_by == [here] * 2, "once a step, by who trains"
    started = {(thread != here, kind, mark is not None) for thread, kind, mark in bus.copies}
    sums = (True, "gradients", True) if accumulates else (False, "gradients", False)
    assert started == {sums, (True, "parameters", True)}
    assert all(bool((unit.params[0] == 0.5).all()) for unit in parts.units)


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1.5)
@pytest.mark.parametrize("accumulates", [False, True])
def test_parameters_cross_the_bus_beside_what_was_computed_behind_the_step(accumulates: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bus = StreamBus(device)
    parts = make(1, device=device, bus=bus, accumulates=accumulates)
    for _ in range(2):  # the first step makes states, and loads kernels
        parts.put_gradients()
        parts.update.begin(1.0)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(1 << 30)  # the first unit computes
        ends[1].record()
        for future in list(parts.host._pending.values()):
            future.result(DEADLINE_S)
        with torch.cuda.stream(bus._back):
            ends[0].record()
        parts.update.settle()
        torch.cuda.synchronize()
    assert ends[0].elapsed_time(ends[1]) > 0, "copies have waited for the next forward"
    assert all(bool((unit.params[0] == 0.5).all()) for unit in parts.units)
    parts.update.close()


def test_the_thread_that_steps_uses_the_device_that_trains(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, torch.device]] = []
    module = torch.get_device_module(device)
    monkeypatch.setattr(module, "set_device", lambda to: given.append((threading.current_thread().name, to)))
    parts = make(device=device, bus=bus_for(device))
    parts.put_gradients()
    parts.update.begin(1.0)
    parts.update.settle()
    parts.update.close()
    assert given == [("host-optimizer_0", device)]


def test_a_share_of_the_cores_is_the_last_of_them() -> None:
    import os

    mine = sorted(os.sched_getaffinity(0))
    assert share_of_cores(1.0) is None
    if len(mine) > 1:
        assert share_of_cores(0.5) == mine[-(len(mine) // 2) :]
        assert share_of_cores(0.0) == mine[-1:]
