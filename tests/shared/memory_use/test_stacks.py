"""Stacks at a peak: the same after a record, and as lines."""

from __future__ import annotations

import json

from dsrun.memory_use.stacks import StacksAtPeak, StackUse, stacks_from_record, stacks_lines, stacks_record

MIB = 1 << 20
FOUND = StacksAtPeak(
    peak_bytes=30 * MIB,
    before_bytes=10 * MIB,
    stacks=(
        StackUse(nbytes=12 * MIB, count=24, frames=("model.py:12 block", "train.py:5 main")),
        StackUse(nbytes=8 * MIB, count=1, frames=()),
    ),
    snapshot="/jobs/a/memory_history.pickle",
)


def test_they_are_the_same_after_their_record() -> None:
    assert stacks_from_record(json.loads(json.dumps(stacks_record(FOUND)))) == FOUND


def test_each_stack_has_its_bytes_tensors_and_lines() -> None:
    assert stacks_lines(FOUND) == [
        "GPU peak of the recorded steps 30.0 MiB, of it 10.0 MiB from before them",
        "    12.0 MiB     24 x  model.py:12 block",
        "                      from train.py:5 main",
        "     8.0 MiB      1 x  no Python stack: C++ of the backward",
        "  all of it: /jobs/a/memory_history.pickle, for pytorch.org/memory_viz",
    ]
