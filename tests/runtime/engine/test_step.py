"""A step updates what all ranks computed alike, and nothing where they did not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.overrides import TorchFunctionMode

from dsrun.contract.heartbeats import Beat, HeartbeatTable, HeartbeatWriter
from dsrun.errors import ModelError
from dsrun.runtime.engine.step import StepParts, spread_of, take_step
from dsrun.runtime.engine.step_sums import RankNumbers
from dsrun.runtime.mesh.c10d import C10dCollectives
from dsrun.runtime.mesh.collectives import Collectives, Pending
from dsrun.runtime.mesh.join.groups import RankInfo, join
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.wait_times import WaitTimes
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.precision.policy import FP32
from dsrun.runtime.zero.access.pieces import Pieces
from dsrun.runtime.zero.access.script_writes import ScriptWrites
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.grads.reducer import GradReducer
from dsrun.runtime.zero.units.find import UnitSpec
from dsrun.runtime.zero.units.plan import ZeroPlan
from support.host_reads import READS, HostReads, NamedReads

NUMEL = 1024  # without padding for one rank and for two


class Blind(LoopbackCollectives):
    """Does not compare what is gathered, as Gloo and NCCL do not."""

    def __init__(self, axis: LoopbackCollectives) -> None:
        super().__init__(axis._world, axis.rank)

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        return super().all_gather(output_N, shard_S)


def parts_of(collectives: Collectives, stage: int) -> StepParts:
    """Three blocks of one size, all ones, under SGD with a rate of 1."""
    plan = ZeroPlan.of_stage(stage)
    specs = [
        UnitSpec(f"blocks.{i}", nn.Identity(), ((f"blocks.{i}.w", nn.Parameter(torch.ones(NUMEL))),)) for i in range(3)
    ]
    group_of = {id(param): 0 for spec in specs for _, param in spec.params}
    units = build_units(
        specs, plan, lambda _: collectives, precision=FP32, device=torch.device("cpu"), group_of=group_of
    )
    store = build_store(units, plan, collectives)
    reducer = GradReducer(
        units,
        collectives,
        shard_optimizer=plan.shard_optimizer,
        shard_gradients=plan.shard_gradients,
        notes_unused=False,  # no backward gives them the gradients that these steps are taken of
    )
    optimizer = ShardOptimizer([unit.owned_range(group_of) for unit in units], group_count=1)
    optimizer.drive(optim.SGD(optimizer.shards_by_group()[0], lr=1.0))
    for unit in units:
        unit.grad_sum.fill_(0.5)
    reducer.has_sums = True
    writes = ScriptWrites(
        [],
        Pieces(plan, collectives, store, None),
        device=torch.device("cpu"),
        settle=lambda: None,
        is_put_away=lambda: False,
    )
    return StepParts(
        units=units,
        plan=plan,
        world=collectives,
        spread=spread_of(units, plan, collectives, stages=1, device=torch.device("cpu")),
        device=torch.device("cpu"),
        reducer=reducer,
        optimizer=optimizer,
        store=store,
        writes=writes,
    )


def told_by(rank: int) -> Tensor:
    """A loss, and what a rank requests to stop."""
    numbers = RankNumbers(torch.device("cpu"))
    numbers.add("losses", 1.0 + rank)
    numbers.put("stop_request", 10.0 * rank)
    return numbers.values_N()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_updates_clips_forgets_and_sums_the_losses(stage: int, size: int) -> None:
    def body(collectives: LoopbackCollectives) -> None:
        parts = parts_of(collectives, stage)
        norm = 0.5 * (3 * NUMEL) ** 0.5
        result = take_step(parts, at="", numbers_N=told_by(collectives.rank), clipping=norm / 2, skip_non_finite=True)
        assert result.applied
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        assert result.sums.losses == sum(range(1, size + 1))
        assert result.sums.stop_request == 10 * (size - 1), "what any rank requests to stop, all know"
        for unit in parts.units:
            torch.testing.assert_close(unit.master, torch.full_like(unit.master, 0.75), rtol=1e-5, atol=0)
        # Forgotten: a step without a backward before it changes nothing.
        again = take_step(parts, at="", numbers_N=told_by(collectives.rank), clipping=0.0, skip_non_finite=True)
        assert again.grad_norm == 0
        for unit in parts.units:
            torch.testing.assert_close(unit.master, torch.full_like(unit.master, 0.75), rtol=1e-5, atol=0)

    LoopbackWorld(size).run(body)


def test_ranks_that_gathered_other_blocks_are_refused_by_name_and_nothing_is_updated() -> None:
    def body(collectives: LoopbackCollectives) -> str:
        parts = parts_of(Blind(collectives), 3)
        for index in (0, 1 + collectives.rank):
            parts.store.acquire(parts.units[index])
            parts.store.release(parts.units[index])
        with pytest.raises(ModelError) as caught:
            take_step(
                parts,
                at=" at step 5, micro step 2",
                numbers_N=told_by(collectives.rank),
                clipping=0.0,
                skip_non_finite=False,
            )
        assert all(bool((unit.grad_sum == 0.5).all()) for unit in parts.units)
        return str(caught.value)

    for said in LoopbackWorld(2).run(body):
        assert "gather 2 at step 5, micro step 2 is of `blocks.1` on rank 0 and of `blocks.2` on rank 1" in said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_has_one_host_read_which_says_what_it_is_of(stage: int) -> None:
    def body(collectives: LoopbackCollectives) -> None:
        reading = NamedReads(collectives)
        parts = parts_of(reading, stage)
        with HostReads(reading) as reads:
            take_step(parts, at="", numbers_N=told_by(reading.rank), clipping=1.0, skip_non_finite=True)
        assert reads.of == ["gradient norm and mean loss"]

    LoopbackWorld(2).run(body)


def test_the_search_for_a_gradient_that_is_not_finite_says_what_it_waits_for() -> None:
    def body(collectives: LoopbackCollectives) -> None:
        reading = NamedReads(collectives)
        parts = parts_of(reading, 2)
        if reading.rank == 1:
            parts.units[1].grad_sum[0] = math.nan
        with HostReads(reading) as reads:
            result = take_step(parts, at="", numbers_N=told_by(reading.rank), clipping=1.0, skip_non_finite=True)
        assert result.non_finite == "blocks.1.w"
        # Looks at the rank's own gradients wait for no other rank.
        assert [label for label in reads.of if label is not None] == [
            "gradient norm and mean loss",
            "non-finite gradient",
        ]

    LoopbackWorld(2).run(body)


class AtRead(TorchFunctionMode):
    """Looks at what an agent sees while the host reads."""

    def __init__(self, table: HeartbeatTable) -> None:
        super().__init__()
        self.seen: list[Beat | None] = []
        self._table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in READS:
            self.seen.append(self._table.read(0))
        return func(*args, **(kwargs or {}))


class Instant:
    """A point of a stream; a quarter of a second lies between any two."""

    def record(self) -> None:
        """See `TimingEvent`."""

    def query(self) -> bool:
        """See `TimingEvent`."""
        return True

    def elapsed_time(self, end_event: object) -> float:
        """See `TimingEvent`."""
        del end_event
        return 250.0


def test_an_agent_sees_what_a_rank_waits_for_where_waits_do_not_block_the_host() -> None:
    join(RankInfo(), backend="gloo", device=torch.device("cpu"), timeout_s=5)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    table = HeartbeatTable(1)
    heartbeat = HeartbeatWriter(table.path)
    waits = WaitTimes(heartbeat, make_event=Instant, is_capturing=lambda: False)
    parts = parts_of(C10dCollectives(group, waits, blocks_host=False), 1)
    heartbeat.beat(step=4, phase="step")
    with AtRead(table) as reads:
        take_step(parts, at="", numbers_N=told_by(0), clipping=1.0, skip_non_finite=True)
    [during] = reads.seen
    after = table.read(0)
    table.close()
    assert during is not None
    assert after is not None
    assert (during.step, during.phase, after.step, after.phase) == (4, "step", 4, "step")
    assert during.collective.startswith("results of gradient norm and mean loss, last begun all_reduce of gradient")
    assert after.collective == ""
    # A device's time between two points of its stream was waited for others, and the host's in the read was not.
    assert (during.waited_s, after.waited_s) == (0, pytest.approx(0.25 * len(waits.snapshot())))
    assert "all_reduce of gradient norm and mean loss" in waits.snapshot()
