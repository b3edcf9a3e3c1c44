"""The optimizer's step in host memory, range by range, by a thread of its own while the device goes on.

Where gradients come from: `offload/host_gradients.py`. What one range's step is: `ways.py`. When parameters are wanted,
and what ranks exchange then, is decided by who composes it.

[Note: the step beside]
A step begins when the norm is known, so that clipping and skipping are exact. One thread takes the ranges in the order
in which the next forward wants them; each one's new parameters start over the bus when it is done. Who needs a range
waits for that range alone; who reads state, or changes what the step reads, lets it settle first.
Options (rates, decays) are those at the beginning: a schedule may set new ones at once.
Copies are started by that thread while the device has much of the next forward already. They begin behind the point of
the compute stream at which the step has begun: the last uses of old parameters and the last additions to sums lie
before it, and what comes behind it waits for each range (`wait`) before it touches either. So a unit's parameters cross
the bus beside the compute of the unit before.

[Note: in place] New parameters are written where the gradient they came of has been, block by block behind the reader,
so that host memory holds 14 bytes an element of Adam in bf16 and no buffer beside. Where both have other dtypes, they
go through a ring; where parameters are fp32, the masters themselves are what goes over the bus. Where ranges may be
stepped ahead, gradients must outlive that, and parameters have a place of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import DsrunError, OffloadError

from ...compat import set_own_threads
from ...memory.arenas import Arenas
from ...memory.bus import Bus, Event, make_current
from ...memory.host_pool import HostPool
from ...optim.sharded import ShardOptimizer
from ...optim.states.coded import head_of
from ..ahead.double_buffer import DoubleBuffer
from ..ahead.speculation import AheadCounts, RangeAhead, Speculation
from ..host_gradients import HostGradients
from ..states.host_range import HostRange, part_of
from ..states.keeper import StateKeeper
from .ways import BlockStep, RangeWork

#: Host buffers for new parameters on their way to the device: one is written while another is read.
RING = 2


class CpuOptimizer:
    """See [Note: the step beside].

    Args:
        ranges: ranges of all units, by their number.
        optimizer: optimizer that has the ranges' options and states.
        gradients: gradients of the ranges, in host memory or on their way there.
        steps: object that steps a range.
        order: numbers of the ranges, as the next forward wants them.
        bus: bus between host and device.
        pool: pool that makes the host memory.
        memory: arenas in which the step's buffers are reserved.
        cores: CPU cores that the step may run on; None for all that the process may use.
        keeper: keeper of masters and states where they are not always in memory; None where they are.
        second: second set of memory for ranges that are stepped ahead; None where no range is stepped before the norm
            is known.
        say: function that prints a message once for the whole job.
        before_change: callback in the step's thread that gets the number of a range before its masters and states
            change.
    """

    def __init__(
        self,
        ranges: Sequence[HostRange],
        optimizer: ShardOptimizer,
        gradients: HostGradients,
        steps: BlockStep,
        *,
        order: Sequence[int],
        bus: Bus,
        pool: HostPool,
        memory: Arenas,
        cores: Sequence[int] | None = None,
        keeper: StateKeeper | None = None,
        second: DoubleBuffer | None = None,
        say: Callable[[str], None] = print,
        before_change: Callable[[int], None] | None = None,
    ) -> None:
        assert keeper is None or second is None, "what is stepped ahead is always in memory"
        self._keeper = keeper
        self._before_change = before_change
        self._ranges = ranges
        self._optimizer = optimizer
        self._gradients = gradients
        self._steps = steps
        self._bus = bus
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="host-optimizer", initializer=partial(_move_to, cores, gradients.device)
        )
        self._second = second
        self._speculation: Speculation | None = None
        if second is not None:
            self._speculation = Speculation(
                ranges, optimizer, gradients, steps, second, submit=self._thread.submit, say=say
            )
        self._pending: dict[int, Future[Event | None]] = {}
        self._failure: DsrunError | None = None
        self._changed: dict[int, dict[str, Any]] = {}
        self._under_way = False
        self._begun: Event | None = None  # where the compute stream was when the step began
        self._ring: list[Tensor] = []
        self._ring_reads: list[Event | None] = [None] * RING
        self._turn = 0
        compute = ranges[0].target_N.dtype
        largest = max(item.numel for item in ranges)
        self._ring_arena = memory.growing("parameter ring", lambda numel: pool.zeros(numel, dtype=compute), tier="host")
        if any(self._needs_ring(index) for index in range(len(ranges))):
            self._ring = [self._ring_arena.take(largest) for _ in range(RING)]
        self._largest = largest
        self.follow(order)

    def follow(self, order: Sequence[int]) -> None:
        """Says in which order ranges are stepped from the next step on."""
        assert sorted(order) == list(range(len(self._ranges))), "an order names every range once"
        self._order = list(order)
        self._gradients.follow(order)

    def buffers(self) -> list[Tensor]:
        """Returns what is held besides masters and states, on the device and on the host."""
        kept = [] if self._keeper is None else self._keeper.buffers()
        ahead = [] if self._second is None else self._second.buffers()
        return [*self._gradients.buffers(), *self._ring, *kept, *ahead]

    @property
    def ahead(self) -> AheadCounts | None:
        """What came of steps that were begun during backward; None where none are."""
        return None if self._speculation is None else self._speculation.counts()

    def expect(self, coefficient: float | None) -> None:
        """A backward begins, and the last step has settled.

        Args:
            coefficient: `begin` will be called with, if neither clipping nor overflow acts; None: more micro steps
                follow before it.
        """
        if self._speculation is not None:
            self._speculation.assume(coefficient)

    def leave_out(self) -> None:
        """There will be no step from the present gradients: their norm is not finite."""
        if self._speculation is not None:
            self._speculation.give_up("not finite")

    def keep_still(self) -> None:
        """Settles; and a step that has been begun ahead is taken again, for somebody may set what it started from."""
        self.settle()
        if self._speculation is not None:
            self._speculation.give_up("interrupted")

    @property
    def order(self) -> list[int]:
        """Numbers of the ranges, as they are stepped."""
        return list(self._order)

    def begin(self, coefficient: float, unused: Collection[str] = ()) -> None:
        """Begins a step from the gradients that have been taken; the last one has settled.

        Args:
            coefficient: gradients are multiplied by it.
            unused: parameters that are left as they are.
        """
        assert not self._under_way, "the last step was not settled"
        self._under_way = True
        if self._speculation is not None and unused:
            self._speculation.spare([n for n, item in enumerate(self._ranges) if item.has_any(unused)])
        options = self._optimizer.begin_away(coefficient, unused)
        if self._keeper is not None:
            self._keeper.begin()
        ahead = {} if self._speculation is None else self._speculation.judge(coefficient, options)
        self._begun = self._bus.mark()
        self._gradients.prepare(self._begun)
        self._reserve_ring()
        following = [*self._order[1:], None]
        for index, after in zip(self._order, following, strict=True):
            self._pending[index] = self._thread.submit(
                self._finish_range,
                index,
                ahead.get(index),
                after=after,
                coefficient=coefficient,
                options=options,
            )

    def wait(self, index: int) -> None:
        """Returns when what the device is given next finds the range's new parameters.

        Raises:
            OffloadError: the step of this range, or of one before it, has failed.
        """
        if self._failure is not None:
            raise self._failure
        if not self._pending or index not in self._pending:
            return
        for earlier in self._order:
            future = self._pending.get(earlier)
            if future is not None:
                self._take(earlier, future)
            if earlier == index:
                return

    def settle(self) -> None:
        """Returns when the step is done and all its parameters are on their way in front of what the device is given.

        Raises:
            OffloadError: the step of a range has failed.
        """
        if not self._under_way:
            if self._failure is not None:
                raise self._failure
            return
        self.wait(self._order[-1])
        self._under_way = False
        self._gradients.forget()
        self._optimizer.end_away(self._changed)
        self._changed.clear()
        if self._keeper is not None:
            try:
                self._keeper.end()
            except DsrunError as error:
                self._failure = error
                raise

    def close(self) -> None:
        """Waits for what is under way, whatever comes of it, and ends the thread."""
        if self._speculation is not None:
            self._speculation.give_up("interrupted")
        self._thread.shutdown(wait=True)
        if self._keeper is not None:
            self._keeper.close()

    def _take(self, index: int, future: Future[Event | None]) -> None:
        try:
            event = future.result()
        except Exception as error:
            for other in self._pending.values():
                other.cancel()
            self._pending.clear()
            self._failure = OffloadError(
                f"optimizer step of {self._ranges[index].label} in host memory: {type(error).__name__}: {error}",
                hint="parameters and states are of two steps now: load the last checkpoint",
            )
            raise self._failure from error
        del self._pending[index]
        if event is not None:
            self._bus.wait(event)

    def _finish_range(
        self,
        index: int,
        ahead: Future[RangeAhead] | None,
        *,
        after: int | None,
        coefficient: float,
        options: Sequence[dict[str, Any]],
    ) -> Event | None:
        """Ends the step of one range; in the thread. Returns when its parameters are there: the event of their copy."""
        if self._before_change is not None:
            self._before_change(index)
        if ahead is not None:
            assert self._speculation is not None, "it was stepped ahead"
            changed = self._speculation.adopt(index, ahead.result())
            if changed is not None:
                for group, values in changed.items():
                    self._changed.setdefault(group, {}).update(values)
                assert self._second is not None, "it was stepped there"
                return self._send(self._ranges[index], self._second.parameters(index), None)
        return self._step_range(index, after=after, coefficient=coefficient, options=options)

    @torch.no_grad()
    def _step_range(
        self, index: int, *, after: int | None, coefficient: float, options: Sequence[dict[str, Any]]
    ) -> Event | None:
        """Steps one range in place."""
        item = self._ranges[index]
        if after is not None:
            self._gradients.start(index)
            self._gradients.start(after)  # comes while this range is stepped
        if self._keeper is not None:
            self._keeper.bring(index)
            if after is not None:
                self._keeper.expect(after)
        gradient = self._gradients.fetch(index)
        out_N, slot = self._place_of(index)
        form = self._optimizer.states.form
        for run in item.runs:
            if run in self._optimizer.left_out:
                if out_N is not None:
                    part_of(run, out_N).copy_(run.param.data)
                continue
            states, scalars = self._optimizer.states.split(run)
            first = run.start - run.owned.start
            halves = None if item.halves is None else item.halves.of(first, first + run.numel)
            work = RangeWork(
                master_N=run.param.data if halves is None else halves,
                grads_N=part_of(run, gradient.values_N),
                states=states,
                scalars=scalars,
                options=options[run.group],
                grad_scale=coefficient * gradient.factor,
                params_out_N=None if out_N is None else part_of(run, out_N),
                place=partial(self._optimizer.states.place, run),
                form=form,
                head=head_of(run) if form.is_coded else 0,
            )
            self._steps.step(work)
            if item.halves is not None and halves is not None:
                item.halves.keep(first, halves)
            self._optimizer.states.keep(run, states, scalars)
            self._changed.setdefault(run.group, {}).update(work.changed)
        if out_N is not None:
            out_N[item.end :].zero_()  # padding stays zeros, whatever the buffer held
        event = self._send(item, out_N, slot)
        if self._keeper is not None:
            if out_N is None and event is not None:
                event.synchronize()  # the copy reads the masters themselves
            self._keeper.put_away(index)
        return event

    def _send(self, item: HostRange, out_N: Tensor | None, slot: int | None) -> Event | None:
        """Starts a range's new parameters over the bus, where they do not stay."""
        if item.stays:
            return None
        source_N = item.master_N if out_N is None else out_N
        if item.sink is not None:
            item.sink(source_N)
            return None
        event = self._bus.start_back(source_N, item.target_N, kind="parameters", mark=self._begun)
        if slot is not None:
            self._ring_reads[slot] = event
        return event

    def _place_of(self, index: int) -> tuple[Tensor | None, int | None]:
        """Returns where a range's parameters are written, and the ring's slot if it is one; see [Note: in place]."""
        item = self._ranges[index]
        if item.is_its_parameters:
            return None, None
        if item.stays:
            return item.target_N, None
        own = self._gradients.own_place(index)
        if own is not None and own.dtype == item.target_N.dtype:
            return own, None
        if self._second is not None:
            return self._second.parameters(index), None
        slot, self._turn = self._turn, (self._turn + 1) % RING
        read = self._ring_reads[slot]
        if read is not None:
            read.synchronize()
        return self._ring[slot].narrow(0, 0, item.numel), slot

    def _needs_ring(self, index: int) -> bool:
        item = self._ranges[index]
        if item.stays or item.is_its_parameters or self._second is not None:
            return False
        return self._gradients.place_dtype(index) != item.target_N.dtype

    def _reserve_ring(self) -> None:
        if not self._ring and any(self._needs_ring(index) for index in self._order):
            self._ring = [self._ring_arena.take(self._largest) for _ in range(RING)]


def share_of_cores(share: float) -> list[int] | None:
    """Returns the cores for a share of those that this process may run on: the last ones; None where it is all."""
    mine = sorted(os.sched_getaffinity(0))
    count = max(1, min(len(mine), int(share * len(mine))))
    return None if count == len(mine) else mine[-count:]


def _move_to(cores: Sequence[int] | None, device: torch.device) -> None:
    """Runs in the thread: it, and those that its operations start, stay on these cores, one thread on each."""
    make_current(device)
    if cores is not None:
        os.sched_setaffinity(0, cores)
        set_own_threads(len(cores))
