"""Collectives by torch.distributed: what every backend does well, and what Gloo does well.

[Note: two communicators] Gathers and reductions of a step are in flight at the same time. On one communicator they
would wait for each other, for its work runs in one order (on CUDA: on one stream of its own), so reductions have a
group to themselves. Each of the two has one order on all ranks. The order *between* them is each rank's own: it follows
the rank's backward, and where ranks use other units, one launches a gather before a reduction and another after it.
Gloo waits for neither. NCCL's guide asks for one order on all ranks, and says that others work as long as the kernels
of both fit on the device together: a kernel takes a block a channel (32 at most; an H100 has 132 multiprocessors), and
each communicator has a stream of its own. They fit no more where CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron's
scripts set, puts all streams into one hardware queue: the kernel in front waits for another rank, whose own is behind.
NCCL_LAUNCH_ORDER_IMPLICIT=1 does the same on purpose. `order_warning` names both.

[Note: no error from NCCL] A rank that does not come is an error of `wait` under Gloo, and of nobody under NCCL: `wait`
blocks a stream, and the host waits in its next read for as long as the device does. What ends it is the launcher, which
sees a heartbeat that stands still and says what was read and begun last (see [Note: named waits]), or later the
watchdog of torch, which kills the process by SIGABRT when a collective is older than the group's time-out. So under
NCCL `_failure` and `Whereabouts` serve only what torch finds as a call *begins*, as a communicator that cannot be made
or was aborted, and TORCH_NCCL_BLOCKING_WAIT=1, by which `wait` blocks the host.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.errors import DsrunError

from ..compat import all_gather_single, backends_of, reduce_scatter_single, store_of
from .collectives import (
    CountedAllToAll,
    NoObserver,
    PartNumels,
    Pending,
    Traffic,
    WaitKind,
    WaitObserver,
    own_slice,
    wait_name,
)
from .last_positions import Whereabouts
from .step_position import Where

#: Between two looks at whether a collective has ended.
_LOOK_S = 0.001
#: Longest name of a read: as much as a heartbeat keeps.
_READ_BYTES = 112


@dataclass(slots=True)
class _Begun:
    """The collective that was begun last on a communicator; no work of torch's is kept for it.

    Attributes:
        name: name of the collective.
        waited: `wait` has been called, so a later read by the host ends behind it.
    """

    name: str
    waited: bool = False


class _Works:
    """torch.distributed works under one handle.

    Args:
        works: torch.distributed works that were started; None entries are ignored.
        name: name of the whole collective, for the observer.
        observer: observer that is told of the wait.
        blocks_host: whether `wait` blocks the thread that calls it.
        ended: callback, called once all works have been waited for.
        failed: function that gets the collective's name and torch's error, and returns the error to raise.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        name: str,
        observer: WaitObserver,
        *,
        blocks_host: bool,
        ended: Callable[[], None],
        failed: Callable[[str, Exception], DsrunError],
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._name = name
        self._observer = observer
        self._blocks_host = blocks_host
        self._ended = ended
        self._failed = failed

    @property
    def is_unwaited(self) -> bool:
        """Whether nobody has begun to wait for it."""
        return bool(self._works)

    def has_ended(self) -> bool:
        """Whether every work has ended, though nobody has waited for it; a look, no wait."""
        return self.is_unwaited and all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Waits for each work; the second call returns at once. After an error the name stays with the observer."""
        works, self._works = self._works, []
        if not works:
            return
        self._observer.enter(self._name, WaitKind.THREAD if self._blocks_host else WaitKind.STREAM)
        started_s = time.perf_counter()
        try:
            for work in works:
                work.wait()
        except (dist.DistError, RuntimeError) as error:
            raise self._failed(self._name, error) from error
        self._observer.leave(time.perf_counter() - started_s)
        self._ended()


def collectives_over(group: dist.ProcessGroup) -> C10dCollectives:
    """Returns collectives over a group of the script's own, of tensors where its backend has them."""
    device = _device_of(group)
    return C10dCollectives(group, device=device) if device.type == "cuda" else GlooCollectives(group, device=device)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    on_gpu = backends_of(group).get("cuda") == "nccl" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _read_name(label: str, last_begun: Sequence[str]) -> str:
    """Returns how a read by the host is called; long names of collectives lose their middle, so that each is told."""
    name = f"results of {label}"
    if not last_begun:
        return name
    name = f"{name}, last begun "
    room = (_READ_BYTES - len(name) - len(" and ") * (len(last_begun) - 1)) // len(last_begun)
    return name + " and ".join(_cut_middle(each, max(room, 16)) for each in last_begun)


def _cut_middle(name: str, room: int) -> str:
    half = (room - 3) // 2
    return name if len(name) <= room else f"{name[:half]}...{name[-half:]}"


_REDUCE_OPS: dict[str, Callable[[], dist.ReduceOp.RedOpType]] = {
    "sum": lambda: dist.ReduceOp.SUM,
    "max": lambda: dist.ReduceOp.MAX,
}


def _works(*started: Any) -> list[dist.Work | None]:
    """Gives what torch's calls return the type that it has."""
    return list(started)


class C10dCollectives(CountedAllToAll):
    """torch.distributed over one process group, or two: the calls that every backend does well.

    See [Note: two communicators] and [Note: no error from NCCL].

    Args:
        group: the axis.
        observer: observer that is told of this rank's waits; None for no observer.
        reductions: another group of the same ranks, for what is summed up; None: the same one.
        where: the step this rank is in, for errors.
        device: device of the tensors; None: the GPU if the group has NCCL for it, else the CPU.
        blocks_host: whether `wait` stops the thread that calls it; None: as for tensors on that device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        observer: WaitObserver | None = None,
        *,
        reductions: dist.ProcessGroup | None = None,
        where: Where | None = None,
        device: torch.device | None = None,
        blocks_host: bool | None = None,
    ) -> None:
        self.group = group
        self.reductions = group if reductions is None else reductions
        self._observer = NoObserver() if observer is None else observer
        self._where = Where() if where is None else where
        self._ranks = dist.get_process_group_ranks(group)
        self._device = _device_of(group) if device is None else device
        self._blocks_host = self._device.type != "cuda" if blocks_host is None else blocks_host
        self._under_way = 0
        #: Of collectives, as far as somebody still has them.
        self._handles: weakref.WeakSet[_Works] = weakref.WeakSet()
        #: Of gathers, and of what goes through `reductions`.
        self._last_begun: list[_Begun | None] = [None, None]
        self.rank = group.rank()
        self.size = group.size()
        self.traffic = Traffic()

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives`: memory of no special kind."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: one all-gather."""
        self.traffic.count("all_gather", output_N)
        return self._start(
            "all_gather", label, lambda: _works(all_gather_single(output_N, shard_S, group=self.group, async_op=True))
        )

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: one reduce-scatter in place."""
        self.traffic.count("reduce_scatter", buffer_N)
        shard = own_slice(buffer_N, rank=self.rank, size=self.size)
        return self._start(
            "reduce_scatter",
            label,
            lambda: _works(reduce_scatter_single(shard, buffer_N, group=self.reductions, async_op=True)),
            reduces=True,
        )

    def all_reduce(self, buffer_N: Tensor, *, op: str = "sum", label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("all_reduce", buffer_N)
        return self._start(
            "all_reduce",
            label,
            lambda: _works(dist.all_reduce(buffer_N, op=_REDUCE_OPS[op](), group=self.reductions, async_op=True)),
            reduces=True,
        )

    def broadcast(self, buffer_N: Tensor, *, source: int, label: str = "") -> Pending:
        """See `Collectives`."""
        self.traffic.count("broadcast", buffer_N)
        return self._start(
            "broadcast",
            label,
            lambda: _works(dist.broadcast(buffer_N, group_src=source, group=self.group, async_op=True)),
        )

    def _exchange(self, output_M: Tensor, input_N: Tensor, parts: PartNumels, label: str) -> Pending:
        return self._start(
            "all_to_all",
            label,
            lambda: _works(
                dist.all_to_all_single(output_M, input_N, parts.receive, parts.send, group=self.group, async_op=True)
            ),
        )

    def barrier(self) -> None:
        """See `Collectives`: an all-reduce of one number, which unlike c10d's barrier needs no device to be named."""
        self.traffic.calls["barrier"] += 1
        token = torch.zeros(1, device=self._device)
        self._start(
            "barrier",
            "",
            lambda: _works(dist.all_reduce(token, group=self.reductions, async_op=True)),
            reduces=True,
        ).wait()
        # On CUDA the stream alone has waited so far.
        with self.reading("barrier"):
            token.item()

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        """From now on sums up in another group of the same ranks; between two steps, on every rank alike."""
        self.reductions = group

    def reading(self, label: str) -> AbstractContextManager[None]:
        """See `Collectives`; after an error inside, the name stays with the observer."""
        return nullcontext() if self._blocks_host else self._observe_read(label)

    def close(self) -> None:
        """Leaves word that this rank has left, and lets go of the groups; no collective may follow."""
        if self.size > 1:
            Whereabouts(store_of(self.group), self._ranks, self.rank).leave_word(f"has left the job{self._where}")
        self._drop_groups()

    def _drop_groups(self) -> None:
        """Lets go of the groups, whose threads end with the last reference."""
        del self.group, self.reductions

    @property
    def is_idle(self) -> bool:
        """Whether every collective that was begun here has been waited for, or has ended as a look at it says."""
        return self._under_way == sum(handle.has_ended() for handle in list(self._handles))

    def becomes_idle(self, *, patience_s: float) -> bool:
        """Returns whether every collective that was begun here has ended, which is waited for a while.

        A gather ahead of its use is waited for by who uses it; after the last step that is nobody.
        """
        deadline_s = time.monotonic() + patience_s
        while not self.is_idle:
            # Of one that has failed, or whose handle is gone, no look says that it has ended.
            unwaited = sum(handle.is_unwaited for handle in list(self._handles))
            if time.monotonic() >= deadline_s or self._under_way > unwaited:
                return False
            time.sleep(_LOOK_S)
        return True

    @contextmanager
    def _observe_read(self, label: str) -> Generator[None]:
        last_begun = list(self._last_begun)
        ahead = [begun if begun is not None and begun.waited else None for begun in last_begun]
        self._observer.enter(
            _read_name(label, [begun.name for begun in last_begun if begun is not None]), WaitKind.READ
        )
        started_s = time.perf_counter()
        yield
        self._observer.leave(time.perf_counter() - started_s)
        # What this thread's stream waited for before the read is over; others may still be under way.
        for lane, begun in enumerate(ahead):
            if begun is not None and self._last_begun[lane] is begun:
                self._last_begun[lane] = None

    def _start(
        self, collective: str, label: str, begin: Callable[[], Sequence[dist.Work | None]], *, reduces: bool = False
    ) -> Pending:
        """Begins a collective.

        Args:
            collective: name of the collective, such as `all_gather`.
            label: name of the data that the collective moves.
            begin: function that starts the collective and returns torch's works.
            reduces: whether the collective goes through the group for reductions.
        """
        name = wait_name(collective, label)
        self._under_way += 1
        begun = self._last_begun[reduces and self.reductions is not self.group] = _Begun(name)
        try:
            works = begin()
        except (dist.DistError, RuntimeError) as error:
            # What torch finds at once: a connection that has failed before.
            raise self._failure(name, error) from error

        def end() -> None:
            begun.waited = True
            self._under_way -= 1

        handle = _Works(
            works,
            name,
            self._observer,
            blocks_host=self._blocks_host,
            ended=end,
            failed=self._failure,
        )
        self._handles.add(handle)
        return handle

    def _failure(self, name: str, error: Exception) -> DsrunError:
        """Returns the error of a collective that failed or was not joined in time, with where the others are.

        Rare under NCCL, see [Note: no error from NCCL].
        """
        words = Whereabouts(store_of(self.group), self._ranks, self.rank)
        words.leave_word(f"waited in {name}{self._where}")
        return DsrunError(
            f"rank {self._ranks[self.rank]} waited in {name}{self._where}, which not all ranks joined: "
            f"{words.ask()} ({error})",
            hint="every rank must make the same calls in the same order, and get equally many batches; "
            "the log of a rank that has ended says why",
        )


class GlooCollectives(C10dCollectives):
    """Gloo, by the calls it does well.

    Measured with two ranks on one host and 16 MiB of fp32: all_gather_into_tensor 8.6 ms, a broadcast of each slice
    3.0 ms; reduce_scatter_tensor 10.3 ms, all_reduce 7.2 ms. So slices are broadcast, and sums are all-reduced.
    The all-reduce also makes the bits of stage 0 and of the sharded stages the same at every world size.
    """

    def all_gather(self, output_N: Tensor, shard_S: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: each rank broadcasts its slice."""
        self.traffic.count("all_gather", output_N)
        mine = own_slice(output_N, rank=self.rank, size=self.size)
        if mine.data_ptr() != shard_S.data_ptr():
            mine.copy_(shard_S)
        slices = [own_slice(output_N, rank=source, size=self.size) for source in range(self.size)]
        return self._start(
            "all_gather",
            label,
            lambda: _works(
                *(
                    dist.broadcast(each, group_src=source, group=self.group, async_op=True)
                    for source, each in enumerate(slices)
                )
            ),
        )

    def reduce_scatter(self, buffer_N: Tensor, *, label: str = "") -> Pending:
        """See `Collectives`: one all_reduce, of which a rank uses its slice."""
        self.traffic.count("reduce_scatter", buffer_N)
        return self._start(
            "reduce_scatter",
            label,
            lambda: _works(dist.all_reduce(buffer_N, group=self.reductions, async_op=True)),
            reduces=True,
        )
