"""Events of torch's allocator, in its own form, become the stacks that hold memory at the peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.memory_use.stacks import StacksAtPeak, StackUse
from dsrun.runtime.observe.allocation_history import stacks_at_peak, wanted_history


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


LINEAR = frame("/site/torch/nn/functional.py", 9, "linear")
BLOCK, HEAD, TRAIN = frame("model.py", 12, "block"), frame("model.py", 30, "head"), frame("train.py", 5, "main")


def alloc(addr: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": "alloc", "addr": addr, "size": size, "stream": 0, "frames": list(frames)}


def free(addr: int, size: int) -> list[dict[str, Any]]:
    return [
        {"action": action, "addr": addr, "size": size, "stream": 0, "frames": []}
        for action in ("free_requested", "free_completed")
    ]


def test_what_is_alive_at_the_peak_is_summed_by_stack_the_largest_first() -> None:
    events = [
        {"action": "segment_alloc", "addr": 0, "size": 2000, "stream": 0, "frames": []},
        alloc(1, 300, LINEAR, HEAD, TRAIN),
        alloc(2, 200, LINEAR, BLOCK, TRAIN),
        alloc(3, 200, LINEAR, BLOCK, TRAIN),
        *free(1, 300),
        alloc(4, 100),
        *free(2, 200),
        alloc(1, 350),
        *free(1, 350),
    ]
    block, head = ("model.py:12 block", "train.py:5 main"), ("model.py:30 head", "train.py:5 main")
    found = stacks_at_peak(events, before_bytes=1000, snapshot="x.pickle")
    assert found == StacksAtPeak(
        peak_bytes=1700,
        before_bytes=1000,
        stacks=(StackUse(nbytes=400, count=2, frames=block), StackUse(nbytes=300, count=1, frames=head)),
        snapshot="x.pickle",
    )


def test_what_was_there_before_and_is_freed_no_longer_counts() -> None:
    found = stacks_at_peak([*free(77, 400), alloc(1, 900)], before_bytes=1000)
    assert (found.peak_bytes, found.before_bytes, found.stacks[0].nbytes) == (1500, 600, 900)


def test_a_peak_before_the_first_event_has_no_stacks() -> None:
    found = stacks_at_peak([*free(77, 400), alloc(1, 100), *free(1, 100)], before_bytes=1000)
    assert (found.peak_bytes, found.before_bytes, found.stacks) == (1000, 1000, ())


def test_a_stack_of_torch_alone_is_shown_as_it_is() -> None:
    (use,) = stacks_at_peak([alloc(1, 5, LINEAR)], before_bytes=0).stacks
    assert use.frames == ("/site/torch/nn/functional.py:9 linear",)


def test_without_the_variable_or_on_another_rank_nothing_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert wanted_history(device=torch.device("cuda", 0), rank=0, environ={}) is None
    assert wanted_history(device=torch.device("cuda", 0), rank=1, environ={"DSRUN_MEMORY_HISTORY": "1"}) is None
    assert capsys.readouterr().out == ""


def test_on_a_cpu_the_run_says_that_torch_records_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert wanted_history(device=torch.device("cpu"), rank=0, environ={"DSRUN_MEMORY_HISTORY": "1"}) is None
    assert (
        "--memory-history: torch records allocations on GPUs only, and this model is on cpu" in capsys.readouterr().out
    )


def test_on_a_gpu_rank_0_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert wanted_history(device=torch.device("cuda", 0), rank=0, environ={"DSRUN_MEMORY_HISTORY": "1"}) is not None
    assert capsys.readouterr().out == ""


@pytest.mark.cuda
def test_a_tensor_is_named_by_the_line_that_made_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    history = wanted_history(device=device, rank=0, environ={"DSRUN_MEMORY_HISTORY": "1"})
    assert history is not None
    history.start()
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    found = history.finish()
    del held
    assert found.stacks[0].nbytes >= 64 << 20
    assert "test_allocation_history.py" in found.stacks[0].frames[0]
