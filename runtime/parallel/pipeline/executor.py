"""One rank's part of a schedule, done: actions in their order, messages to neighbours, and nothing between batches.

It knows schedules and messages. What a chunk computes, and what becomes of its gradients, is its caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dsrun.pipeline_schedules.actions import Action, Kind, Schedule

from ...mesh.collectives import Pending
from ...mesh.point_to_point.links import Incoming, Lane, PointToPoint
from ...mesh.wait_times import of_micro
from .boundary import Boundary, pack, pack_grads, unpack, unpack_grads


class ChunkWork(Protocol):
    """What is done for each action; every call is of a chunk that this rank has."""

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        """Runs a chunk's forward.

        Args:
            chunk: number of the chunk.
            micro: number of the micro batch.
            received: value that the chunk before has returned; None for the first chunk.

        Returns:
            value for the next chunk; of the last chunk the loss that its backward begins at, or None where there is no
            backward.
        """
        ...

    def backward(
        self, chunk: int, micro: int, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], *, split: bool
    ) -> None:
        """Runs a chunk's backward, which adds to the gradients of its weights and of the leaves that it received.

        Args:
            chunk: number of the chunk.
            micro: number of the micro batch.
            outputs: tensors that it begins at.
            grads: gradient of each; None for a loss, or where the next chunk has found none.
            split: whether gradients of weights are put off, as far as they can be, until `weight_grads`.
        """
        ...

    def weight_grads(self, chunk: int, micro: int) -> None:
        """Computes the gradients of weights that a split backward has put off."""
        ...

    def gather(self, chunk: int) -> None:
        """Gathers a chunk's parameters, until `drop`."""
        ...

    def drop(self, chunk: int) -> None:
        """Gives up a chunk's gathered parameters."""
        ...

    def reduce(self, chunk: int) -> None:
        """Sums up a chunk's gradients over the ranks that have the same chunk: no more come in this batch."""
        ...

    def abandon(self) -> None:
        """The batch has failed: what is put off is forgotten."""
        ...


@dataclass(slots=True)
class _Live:
    """What a chunk keeps of a micro batch between its forward and its backward.

    Attributes:
        received: value from the chunk before, and the tensors of it that carry gradients.
        outputs: tensors that its backward begins at.
        value: value for the next chunk, until it has been handed on.
        grads: gradient of each output, from the next chunk.
        input_grads: gradients of what it received, until they have been handed back.
    """

    received: Boundary
    outputs: tuple[Tensor, ...] = ()
    value: Any = None
    grads: Sequence[Tensor | None] = ()
    input_grads: Sequence[Tensor | None] = ()


class Executor:
    """Runs schedules on one rank; holds nothing from one run to the next.

    Args:
        links: messages to the other ranks of the pipeline.
        boundary_dtype: dtype that floating tensors travel in between ranks; None: their own.
    """

    def __init__(self, links: PointToPoint, *, boundary_dtype: torch.dtype | None = None) -> None:
        self._links = links
        self._dtype = boundary_dtype

    def run(self, schedule: Schedule, work: ChunkWork) -> None:
        """Does this rank's actions; every rank of the pipeline must call, with the same schedule.

        Args:
            schedule: schedule with its communication.
            work: work of this rank's chunks.

        Raises:
            ModelError: a value cannot be handed on; or another rank has ended or does not answer.
        """
        run = _Run(schedule, self._links, work, self._dtype)
        done = run.table()
        for action in schedule.actions[self._links.rank]:
            try:
                done[action.kind](action.chunk, action.micro)
            except BaseException as error:
                work.abandon()
                _note(error, f"in {describe(action)} on stage {self._links.rank} of {schedule.ranks}")
                raise
        run.finish()


def describe(action: Action) -> str:
    """Returns what an action is, in words."""
    words = {
        Kind.FORWARD: "the forward",
        Kind.BACKWARD: "the backward",
        Kind.INPUT_GRADS: "the backward to the inputs",
        Kind.WEIGHT_GRADS: "the gradients of weights",
        Kind.SEND_FORWARD: "the sending of activations",
        Kind.RECEIVE_FORWARD: "the receiving of activations",
        Kind.SEND_BACKWARD: "the sending of gradients",
        Kind.RECEIVE_BACKWARD: "the receiving of gradients",
        Kind.GATHER: "the gathering of parameters",
        Kind.DROP: "the dropping of parameters",
        Kind.REDUCE: "the reduction of gradients",
    }
    micro = "" if action.micro < 0 else f", micro batch {action.micro}"
    return f"{words[action.kind]} of chunk {action.chunk}{micro}"


def _note(error: BaseException, text: str) -> None:
    """Says with an error where it was raised; Python 3.10 shows no notes."""
    add = getattr(error, "add_note", None)
    if add is not None:
        add(text)


class _Run:
    """One run of a schedule on one rank."""

    def __init__(self, schedule: Schedule, links: PointToPoint, work: ChunkWork, dtype: torch.dtype | None) -> None:
        self._schedule = schedule
        self._links = links
        self._work = work
        self._dtype = dtype
        self._last = schedule.chunks - 1
        self._live: dict[tuple[int, int], _Live] = {}
        self._incoming: dict[tuple[Lane, int, int], Incoming] = {}
        self._here: dict[tuple[int, int], Any] = {}  # values for chunks of this rank, by chunk and micro batch
        self._sent: list[Pending] = []

    def table(self) -> dict[Kind, Callable[[int, int], None]]:
        """Returns what does each kind of action."""
        work = self._work
        return {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: partial(self._backward, split=False),
            Kind.INPUT_GRADS: partial(self._backward, split=True),
            Kind.WEIGHT_GRADS: work.weight_grads,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
            Kind.GATHER: lambda chunk, _: work.gather(chunk),
            Kind.DROP: lambda chunk, _: work.drop(chunk),
            Kind.REDUCE: lambda chunk, _: work.reduce(chunk),
        }

    def finish(self) -> None:
        """Returns when all that was sent may be overwritten."""
        for pending in self._sent:
            pending.wait()

    def _rank(self, chunk: int) -> int:
        return self._schedule.rank_of[chunk]

    def _is_here(self, chunk: int) -> bool:
        return self._rank(chunk) == self._links.rank

    def _forward(self, chunk: int, micro: int) -> None:
        received = Boundary(None, ())
        if chunk > 0 and self._is_here(chunk - 1):
            received = self._handed_over(chunk, micro)
        elif chunk > 0:
            message = self._incoming.pop((Lane.ACTIVATIONS, chunk, micro)).wait()
            received = unpack(message.header, message.tensors)
        value = self._work.forward(chunk, micro, received.value)
        live = _Live(received)
        if chunk == self._last:
            live.outputs = () if value is None else (value,)
            live.grads = (None,)
        elif self._is_here(chunk + 1):
            self._here[chunk + 1, micro] = value
            live.outputs = pack(value, dtype=None, where=_place(chunk))[2]
        else:
            live.value = value
        if torch.is_grad_enabled() or live.value is not None:
            self._live[chunk, micro] = live

    def _handed_over(self, chunk: int, micro: int) -> Boundary:
        """Returns what a chunk of this rank has made for the next one, cut off from its graph."""
        header, tensors, _ = pack(self._here.pop((chunk, micro)), dtype=None, where=_place(chunk - 1))
        return unpack(header, tensors)

    def _send_forward(self, chunk: int, micro: int) -> None:
        live = self._live[chunk, micro]
        header, tensors, live.outputs = pack(live.value, dtype=self._dtype, where=_place(chunk))
        live.value = None
        if not torch.is_grad_enabled():
            del self._live[chunk, micro]  # no backward will ask
        self._send(tensors, header, chunk + 1, Lane.ACTIVATIONS, micro)

    def _receive_forward(self, chunk: int, micro: int) -> None:
        self._ask(chunk - 1, chunk, Lane.ACTIVATIONS, micro)

    def _backward(self, chunk: int, micro: int, *, split: bool) -> None:
        live = self._live.pop((chunk, micro))
        if chunk < self._last and not self._is_here(chunk + 1):
            message = self._incoming.pop((Lane.GRADIENTS, chunk, micro)).wait()
            live.grads = unpack_grads(message.header, message.tensors)
        elif chunk < self._last:
            live.grads = self._here.pop((chunk, micro))
        pairs = [
            (output, grad)
            for output, grad in zip(live.outputs, live.grads, strict=True)
            if grad is not None or chunk == self._last
        ]
        self._work.backward(chunk, micro, [output for output, _ in pairs], [grad for _, grad in pairs], split=split)
        if chunk == 0:
            return
        grads = [leaf.grad for leaf in live.received.carriers]
        if self._is_here(chunk - 1):
            self._here[chunk - 1, micro] = grads
        else:
            self._live[chunk, micro] = _Live(Boundary(None, ()), input_grads=grads)

    def _send_backward(self, chunk: int, micro: int) -> None:
        grads = self._live.pop((chunk, micro)).input_grads
        header, tensors = pack_grads(grads, dtype=self._dtype, where=_place(chunk))
        self._send(tensors, header, chunk - 1, Lane.GRADIENTS, micro)

    def _receive_backward(self, chunk: int, micro: int) -> None:
        self._ask(chunk + 1, chunk, Lane.GRADIENTS, micro)

    def _send(self, tensors: list[Tensor], header: bytes, to: int, lane: Lane, micro: int) -> None:
        label = f"{lane.value}{of_micro(micro)} for chunk {to}"
        self._sent.append(self._links.send(tensors, to=self._rank(to), lane=lane, header=header, label=label))

    def _ask(self, source: int, chunk: int, lane: Lane, micro: int) -> None:
        label = f"{lane.value}{of_micro(micro)} for chunk {chunk}"
        self._incoming[lane, chunk, micro] = self._links.receive(source=self._rank(source), lane=lane, label=label)


def _place(chunk: int) -> str:
    return f"chunk {chunk} of the pipeline"
