"""The executor with stages that compute nothing and messages that are there at once: what is left is its own time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsrun.pipeline_schedules.actions import Action, Kind, Schedule
from dsrun.runtime.mesh.collectives import Done, Pending, Traffic
from dsrun.runtime.mesh.point_to_point.links import Incoming, Lane, Message
from dsrun.runtime.parallel.pipeline.boundary import pack, pack_grads
from dsrun.runtime.parallel.pipeline.executor import Executor

_DONE = Done()


def seconds_an_action(rank: int, *, micros: int = 64, batches: int = 5) -> float:
    """Returns the processor time of an action, the least of several batches.

    Args:
        rank: rank of the two of a pipeline whose actions are done.
        micros: micro batches of a batch.
        batches: batches, after one that does not count.
    """
    schedule = Schedule("1f1b", micros, (0, 1), (_first_rank(micros), _last_rank(micros)))
    executor = Executor(_Instant(rank))
    taken: list[float] = []
    for _ in range(batches + 1):
        work = _Nothing()
        began_s = time.process_time()
        executor.run(schedule, work)
        taken.append(time.process_time() - began_s)
    return min(taken[1:]) / len(schedule.actions[rank])


def _first_rank(micros: int) -> tuple[Action, ...]:
    """Returns 1f1b's actions of the first of two ranks: one forward ahead."""
    actions = [Action(Kind.FORWARD, 0, 0), Action(Kind.SEND_FORWARD, 0, 0)]
    for micro in range(micros):
        actions.append(Action(Kind.RECEIVE_BACKWARD, 0, micro))
        if micro + 1 < micros:
            actions += [Action(Kind.FORWARD, 0, micro + 1), Action(Kind.SEND_FORWARD, 0, micro + 1)]
        actions.append(Action(Kind.BACKWARD, 0, micro))
    return tuple(actions)


def _last_rank(micros: int) -> tuple[Action, ...]:
    kinds = (Kind.RECEIVE_FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.SEND_BACKWARD)
    return tuple(Action(kind, 1, micro) for micro in range(micros) for kind in kinds)


class _Come:
    """A message that is there."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def wait(self) -> Message:
        return self._message


class _Instant:
    """See `PointToPoint`: what is sent goes nowhere, and what is asked for is there."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.traffic = Traffic()
        value = torch.zeros(4, requires_grad=True)
        header, tensors, _ = pack(value, dtype=None, where="")
        grad_header, grads = pack_grads([torch.zeros(4)], dtype=None, where="")
        self._come = {
            Lane.ACTIVATIONS: _Come(Message(header, tuple(tensors))),
            Lane.GRADIENTS: _Come(Message(grad_header, tuple(grads))),
        }

    def send(self, tensors: Sequence[Tensor], *, to: int, lane: Lane, header: bytes = b"", label: str = "") -> Pending:
        del tensors, to, lane, header, label
        return _DONE

    def receive(self, *, source: int, lane: Lane, label: str = "") -> Incoming:
        del source, label
        return self._come[lane]

    def close(self) -> None:
        pass


class _Nothing:
    """See `ChunkWork`: a value that is there already, and a gradient that is too."""

    def __init__(self) -> None:
        self._value = torch.zeros(4, requires_grad=True)
        self._grad = torch.zeros(4)
        self._received: dict[int, Any] = {}

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        self._received[micro] = received
        return self._value

    def backward(
        self, chunk: int, micro: int, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], *, split: bool
    ) -> None:
        received = self._received.pop(micro)
        if received is not None:
            received.grad = self._grad

    def weight_grads(self, chunk: int, micro: int) -> None:
        pass

    def gather(self, chunk: int) -> None:
        pass

    def drop(self, chunk: int) -> None:
        pass

    def reduce(self, chunk: int) -> None:
        pass

    def abandon(self) -> None:
        pass
