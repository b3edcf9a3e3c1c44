"""Runs the order of a schedule without times: whether all ranks come to their ends, and where they wait if not."""

from __future__ import annotations

from collections import defaultdict

from .actions import Action, Kind, Schedule

#: Rank that sends, rank that receives, and whether it goes towards the loss.
_Lane = tuple[int, int, bool]


def stuck_at(schedule: Schedule, *, has_messages: bool, capacity: int | None) -> list[str]:
    """Returns the actions that ranks wait at for ever; none if all ranks come to their ends.

    Args:
        schedule: schedule whose actions are each there once.
        has_messages: whether it has sends and receives; False: what a rank makes is at once where it is needed.
        capacity: messages of a lane that may be sent before they are asked for; None: any number.
    """
    run = _Run(schedule, has_messages, capacity)
    ready = list(range(schedule.ranks))
    while ready:
        ready += run.go_on(ready.pop())
    return [
        f"{row[at]} on rank {rank} waits for ever for {run.reason(row[at], rank)}"
        for rank, (row, at) in enumerate(zip(schedule.actions, run.at, strict=True))
        if at < len(row)
    ]


class _Run:
    """How far each rank has come."""

    def __init__(self, schedule: Schedule, has_messages: bool, capacity: int | None) -> None:
        self.at = [0] * schedule.ranks
        self._schedule = schedule
        self._has_messages = has_messages
        self._capacity = capacity
        count = schedule.chunks * schedule.micros
        # What each chunk has been given, by chunk and micro batch: inputs, and gradients of its outputs.
        self._has_inputs, self._has_grads = bytearray(count), bytearray(count)
        self._waiting: dict[tuple[bool, int], int] = {}  # rank that waits for what a chunk is given
        self._blocked: dict[_Lane, int] = {}  # rank that waits for room on a lane
        self._sent: dict[_Lane, int] = defaultdict(int)
        self._asked: dict[_Lane, int] = defaultdict(int)

    def go_on(self, rank: int) -> list[int]:
        """Does the actions of a rank until it must wait; returns the ranks that no longer have to."""
        schedule = self._schedule
        micros, last = schedule.micros, schedule.chunks - 1
        row, woken = schedule.actions[rank], list[int]()
        at = self.at[rank]
        while at < len(row):
            kind, chunk, micro = row[at]
            key = chunk * micros + micro
            if kind is Kind.FORWARD:
                if chunk > 0 and not self._has_inputs[key]:
                    self._waiting[True, key] = rank
                    break
                if chunk < last and self._is_there_at_once(chunk, chunk + 1):
                    self._give(True, key + micros, woken)
            elif kind is Kind.BACKWARD or kind is Kind.INPUT_GRADS:
                if chunk < last and not self._has_grads[key]:
                    self._waiting[False, key] = rank
                    break
                if chunk > 0 and self._is_there_at_once(chunk, chunk - 1):
                    self._give(False, key - micros, woken)
            elif kind is Kind.SEND_FORWARD or kind is Kind.SEND_BACKWARD:
                forward = kind is Kind.SEND_FORWARD
                to = chunk + 1 if forward else chunk - 1
                lane = (rank, schedule.rank_of[to], forward)
                if self._capacity is not None and self._sent[lane] - self._asked[lane] >= self._capacity:
                    self._blocked[lane] = rank
                    break
                self._sent[lane] += 1
                self._give(forward, key + micros if forward else key - micros, woken)
            elif kind is Kind.RECEIVE_FORWARD or kind is Kind.RECEIVE_BACKWARD:
                forward = kind is Kind.RECEIVE_FORWARD
                source = schedule.rank_of[chunk - 1 if forward else chunk + 1]
                lane = (source, rank, forward)
                self._asked[lane] += 1
                if lane in self._blocked:
                    woken.append(self._blocked.pop(lane))
            at += 1
        self.at[rank] = at
        return woken

    def reason(self, action: Action, rank: int) -> str:
        """Returns what a rank waits for at an action."""
        if action.kind is Kind.FORWARD:
            return f"the output of chunk {action.chunk - 1}"
        if action.kind in (Kind.BACKWARD, Kind.INPUT_GRADS):
            return f"the gradients of chunk {action.chunk + 1}"
        to = self._schedule.rank_of[action.chunk + (1 if action.kind is Kind.SEND_FORWARD else -1)]
        return f"rank {to} to ask for one of the {self._capacity} messages under way"

    def _is_there_at_once(self, chunk: int, other: int) -> bool:
        return not self._has_messages or self._schedule.rank_of[chunk] == self._schedule.rank_of[other]

    def _give(self, forward: bool, key: int, woken: list[int]) -> None:
        """Gives a chunk what it needs of a micro batch, and wakes its rank if it waits for that."""
        (self._has_inputs if forward else self._has_grads)[key] = 1
        waiting = self._waiting.pop((forward, key), None)
        if waiting is not None:
            woken.append(waiting)
