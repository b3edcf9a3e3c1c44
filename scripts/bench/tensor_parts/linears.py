"""What a cut Linear costs its host beside a plain one of the same shape, so small that little is computed or sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.collectives import Collectives
from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.parallel.tensor.modules import CutState, SiblingInputs, make_cut
from dsrun.runtime.parallel.tensor.styles import COLUMN, ROW

WIDTH = 16
#: What is timed: a forward that is recorded for backward, and a forward with its backward.
WHATS = ("forward", "forward and backward")
#: Cut layers, each with the plain one that does the same.
PLAIN_OF = {"row": "Linear", "column": "Linear", "one of 3 columns": "one of 3 Linears"}
#: A plain Linear beside a bare sum over the ranks.
WITH_SUM = "Linear and all-reduce"
_SIBLINGS = 3
_TOKENS = 4
_BATCHES = 5
#: Processor time and time of a layer, in microseconds, by layer and by `WHATS`.
Costs = dict[str, dict[str, tuple[float, float]]]


class Layers:
    """Plain and cut Linears, on one rank of an axis; several of them work on one input, as queries, keys and values do.

    Args:
        axis: ranks of the tensor axis.
    """

    def __init__(self, axis: Collectives) -> None:
        self._axis = axis
        self._layers: dict[str, list[nn.Linear]] = {
            "Linear": _linears(1),
            WITH_SUM: _linears(1),
            "row": _linears(1),
            "column": _linears(1),
            "one of 3 Linears": _linears(_SIBLINGS),
            "one of 3 columns": _linears(_SIBLINGS),
        }
        for row in self._layers["row"]:
            make_cut(row, CutState(style=ROW, axis=axis, whole=WIDTH * axis.size))
        for columns in (self._layers["column"], self._layers["one of 3 columns"]):
            inputs = SiblingInputs(axis, columns)
            for column in columns:
                make_cut(column, CutState(style=COLUMN, axis=axis, whole=WIDTH * axis.size, inputs=inputs))

    def times(self, calls: int) -> Costs:
        """Returns what each layer costs this rank; every rank of the axis must call.

        Args:
            calls: calls that are timed together; the least of several such times counts.
        """
        return {name: self._times_of(name, layers, calls) for name, layers in self._layers.items()}

    def _times_of(self, name: str, layers: Sequence[nn.Linear], calls: int) -> dict[str, tuple[float, float]]:
        x = torch.randn(_TOKENS, WIDTH, requires_grad=True)
        buffer, grads = torch.zeros(x.numel()), [torch.ones_like(x)] * len(layers)
        leaves = (x, *(layer.weight for layer in layers))

        def forward() -> list[Tensor]:
            if name == WITH_SUM:
                self._axis.all_reduce(buffer, label="nothing").wait()
            return [layer(x) for layer in layers]

        def both() -> None:
            torch.autograd.grad(forward(), leaves, grads)

        found: dict[str, tuple[float, float]] = {}
        for what, call in zip(WHATS, (forward, both), strict=True):
            cpu_us, call_us = _us_a_call(call, calls)
            found[what] = cpu_us / len(layers), call_us / len(layers)
        return found


def alone() -> Layers:
    """Returns the layers of an axis with one rank."""
    return Layers(AloneCollectives())


def times_on_threads(calls: int, *, ranks: int) -> Costs:
    """Returns what the layers cost the first of several ranks that are threads of this process.

    Args:
        calls: Number of calls in a batch.
        ranks: number of ranks.
    """
    found: list[Costs] = LoopbackWorld(ranks).run(lambda axis: Layers(axis).times(calls))
    return found[0]


def joined_layers() -> Layers:
    """Returns the layers of this process as one rank of a job whose ranks share memory."""
    import torch.distributed as dist

    from dsrun.runtime.mesh.host_memory.collectives import SharedMemoryCollectives

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None, "made above"
    return Layers(SharedMemoryCollectives(dist.group.WORLD, timeout_s=60.0))


def _linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]


def _us_a_call(call: Callable[[], object], calls: int) -> tuple[float, float]:
    cpu_s: list[float] = []
    call_s: list[float] = []
    for _ in range(1 + _BATCHES):
        cpu_began_s, began_s = time.thread_time(), time.perf_counter()
        for _ in range(calls):
            call()
        cpu_s.append((time.thread_time() - cpu_began_s) / calls)
        call_s.append((time.perf_counter() - began_s) / calls)
    return min(cpu_s[1:]) * 1e6, min(call_s[1:]) * 1e6
