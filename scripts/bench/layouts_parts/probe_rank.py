"""One rank of the probes: products, updates and messages of the layouts' sizes, timed while all ranks do the same.

    python -m layouts_parts.probe_rank JOB          (RANK and its kin in the environment, as torchrun sets them)

More words: `probe`, answered with the seconds of each probe in one go. Knows no engine, and of no step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from teams.rank import Rank, serve
from torch import Tensor

from dsrun.runtime.mesh.host_memory.collectives import SharedMemoryCollectives
from dsrun.runtime.mesh.point_to_point.links import Lane
from dsrun.runtime.mesh.point_to_point.mailbox import MailboxPointToPoint

from .job import Job, Probe, ProbeJob
from .products import products_of

_TIMEOUT_S = 60.0
#: Seconds that a probe is repeated for, about.
_GO_S = 0.15


class Probes:
    """What is probed, and the axes for it; every rank of the job must make one.

    Args:
        job: probes.
    """

    def __init__(self, job: ProbeJob) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        self._model = Job(**job.model)
        probes = [Probe(**fields) for fields in job.probes]
        rank, world = dist.get_rank(), dist.get_world_size()
        self._axes: dict[int, SharedMemoryCollectives] = {}
        for size in sorted({world, *(probe.ranks for probe in probes if probe.ranks > 1)}):
            groups: list[Any] = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
            self._axes[size] = SharedMemoryCollectives(groups[rank // size], timeout_s=_TIMEOUT_S)
        assert dist.group.WORLD is not None, "made above"
        self._all = self._axes[world]
        self._links = MailboxPointToPoint(dist.group.WORLD, timeout_s=_TIMEOUT_S)
        self._calls = [self._counted(self._call_of(probe)) for probe in probes]

    def times(self) -> list[float]:
        """Returns the mean over the ranks of each probe's seconds."""
        return [self._seconds(call, count) for call, count in self._calls]

    def _counted(self, call: Callable[[], object]) -> tuple[Callable[[], object], int]:
        """Returns a call and how often it is to be made in one go, as often on all ranks."""
        call()  # the first one finds no memory
        once_s = self._seconds(call, 1)
        return call, max(1, round(_GO_S / once_s))

    def _seconds(self, call: Callable[[], object], count: int) -> float:
        self._all.barrier()
        began_s = time.perf_counter()
        for _ in range(count):
            call()
        taken = torch.tensor([(time.perf_counter() - began_s) / count], dtype=torch.float64)
        self._all.all_reduce(taken).wait()
        return float(taken) / self._all.size

    def _call_of(self, probe: Probe) -> Callable[[], object]:
        match probe.what:
            case "products":
                return products_of(self._model, tokens=probe.size, tensor=probe.ranks)
            case "update":
                return _update(probe.size)
            case "send":
                return self._send(torch.zeros(probe.size // 4))
            case "all_reduce":  # of activations, which do not lie in memory that ranks share
                buffer, axis = torch.zeros(probe.size // 4), self._axes[probe.ranks]
                return lambda: axis.all_reduce(buffer).wait()
            case "all_gather" | "reduce_scatter":
                axis = self._axes[probe.ranks]
                numel = probe.size // 4 // probe.ranks * probe.ranks
                whole = axis.zeros(numel, dtype=torch.float32, device=torch.device("cpu"))
                if probe.what == "reduce_scatter":
                    return lambda: axis.reduce_scatter(whole).wait()
                own = whole.chunk(axis.size)[axis.rank]
                return lambda: axis.all_gather(whole, own).wait()
            case _:
                raise AssertionError(f"unknown probe {probe.what!r}")

    def _send(self, tensor: Tensor) -> Callable[[], object]:
        links = self._links
        behind, before = (links.rank + 1) % links.size, (links.rank - 1) % links.size

        def around() -> None:
            incoming = links.receive(source=before, lane=Lane.ACTIVATIONS)
            links.send([tensor], to=behind, lane=Lane.ACTIVATIONS).wait()
            incoming.wait()

        return around


def _update(numel: int) -> Callable[[], object]:
    param = torch.zeros(numel)
    param.grad = torch.ones(numel)
    optimizer = torch.optim.AdamW([param], fused=True)
    return optimizer.step


class _ProbeRank(Rank):
    def answer(self, word: str, count: int) -> Any:
        """See `Rank`."""
        return self.trainer.times() if word == "probe" else super().answer(word, count)


def _rank(text: str, number: int) -> Rank:
    job = ProbeJob.from_json(text)
    return _ProbeRank(lambda: Probes(job), lambda step: None)


if __name__ == "__main__":
    serve(_rank)
