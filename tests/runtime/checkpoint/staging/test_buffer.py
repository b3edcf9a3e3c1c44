"""Staging memory of a rank with a device: when it is page-locked, what a refusal comes to, and whose device copies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dsrun.runtime.checkpoint.format.policy import SavePolicy
from dsrun.runtime.checkpoint.memory_copy.files import CopyFiles
from dsrun.runtime.checkpoint.save.fence import Fence
from dsrun.runtime.checkpoint.save.request import SaveRequest
from dsrun.runtime.checkpoint.save.saver import Saver
from dsrun.runtime.checkpoint.staging.buffer import PageLocks, Staging
from dsrun.runtime.checkpoint.staging.sources import Copy
from dsrun.runtime.memory.page_lock import CudaLock
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.host_memory.noticeboard import LocalNoticeboard
from support.fake_cuda import DEVICE, FakeCuda, FakeModule, in_a_thread
from support.savers import nothing, value_of, wanted

HEADER = b"header.."


class OnDevice:
    """Values that say that they are on a device."""

    def __init__(self, values: torch.Tensor) -> None:
        self.device = DEVICE
        self._values = values

    def detach(self) -> torch.Tensor:
        return self._values


def staging_with(cuda: FakeCuda, module: FakeModule, said: list[str]) -> Staging:
    locks = PageLocks(partial(CudaLock, calls=cuda), say=said.append)
    return Staging(locks, module_of=lambda device: module)


def copies_of(values: Sequence[torch.Tensor]) -> list[Copy]:
    copies: list[Any] = []
    at = len(HEADER)
    for value in values:
        copies.append(Copy(at, OnDevice(value), 0))  # pyright: ignore[reportArgumentType]
        at += value.nbytes
    return copies


def test_memory_is_locked_when_it_is_touched_once_and_unlocked_when_it_is_given_back() -> None:
    cuda, said = FakeCuda(), list[str]()
    staging = staging_with(cuda, FakeModule(), said)
    copies = copies_of([torch.arange(4.0)])
    for _ in range(2):
        staging.begin(HEADER, 24, copies)
        in_a_thread(staging.touch)
    assert len(cuda.lock_threads) == 1
    assert cuda.lock_threads != ["MainThread"], "who saves has not waited for it"
    assert list(cuda.locked.values()) == [staging.nbytes]
    staging.begin(HEADER, staging.nbytes + 1, copies)
    assert cuda.locked == {}, "the memory that was too small"
    staging.touch()
    assert list(cuda.locked.values()) == [staging.nbytes]
    held = staging._image
    staging.release()
    assert held.numel(), "whoever still holds it"
    assert (cuda.locked, cuda.last_error, said) == ({}, 0, [])


def test_memory_is_unlocked_before_it_goes_with_a_saver_that_nobody_has_closed() -> None:
    cuda = FakeCuda()
    staging = staging_with(cuda, FakeModule(), [])
    staging.begin(HEADER, 24, copies_of([torch.arange(4.0)]))
    staging.touch()
    del staging
    assert cuda.locked == {}


def test_memory_that_cannot_be_locked_is_pageable_and_one_line_says_why() -> None:
    cuda, said = FakeCuda(refuses=2), list[str]()
    staging = staging_with(cuda, FakeModule(), said)
    values = torch.arange(4.0)
    for nbytes in (24, 3 << 20):
        staging.begin(HEADER, nbytes, copies_of([values]))
        staging.touch()
        staging.copy(copies_of([values]), threads=1)
        assert torch.equal(staging._image[8:24].view(torch.float32), values)
    assert len(said) == 1
    assert "2.0 MiB of host memory could not be page-locked (cudaHostRegister: out of memory; " in said[0]
    assert "copies for checkpoints" in said[0]
    assert cuda.last_error == 0
    staging.release()


def test_nothing_is_locked_for_values_of_the_cpu() -> None:
    cuda = FakeCuda()
    staging = staging_with(cuda, FakeModule(), [])
    staging.begin(HEADER, 24, [Copy(8, torch.arange(4.0), 0)])
    staging.touch()
    assert cuda.lock_threads == []
    staging.release()


def test_a_thread_that_copies_makes_no_context_on_another_device() -> None:
    module = FakeModule()
    staging = staging_with(FakeCuda(), module, [])
    copies = copies_of([torch.arange(4.0), torch.ones(2)])
    staging.begin(HEADER, 32, copies)
    in_a_thread(lambda: staging.copy(copies, threads=1))
    assert torch.equal(staging._image[8:32].view(torch.float32), torch.tensor([0.0, 1.0, 2.0, 3.0, 1.0, 1.0]))
    assert module.used_with == [3]
    assert module.contexts == {3}
    staging.release()


def test_copies_in_memory_say_once_why_they_are_pageable(tmp_path: Any) -> None:
    cuda, said = FakeCuda(refuses=2), list[str]()
    files = CopyFiles(tmp_path / "copies", locks=PageLocks(partial(CudaLock, calls=cuda), say=said.append))
    for generation in range(2):
        assert files.image(0, generation, 1000, device=DEVICE).numel() == 1000
    assert (len(said), cuda.last_error) == (1, 0)
    locked = FakeCuda()
    files = CopyFiles(tmp_path / "others", locks=PageLocks(partial(CudaLock, calls=locked), say=said.append))
    files.image(0, 0, 1000, device=DEVICE)
    files.image(0, 1, 500)
    assert list(locked.locked.values()) == [1000]
    files.image(0, 0, 2000, device=DEVICE)
    assert list(locked.locked.values()) == [2000]


def wanted_on(device: torch.device, value: float) -> SaveRequest:
    """A state on a device, each piece of a unit of its own."""
    made = wanted(value, rank=0, size=1)
    entries = [replace(entry, tensor=entry.tensor.to(device)) for entry in made.entries]
    return replace(made, entries=entries, units=range(len(entries)), order=range(len(entries)))


@pytest.mark.parametrize("later", [True, False], ids=["behind", "at once"])
def test_a_thread_saves_with_its_ranks_device_the_values_of_the_moment(
    device: torch.device, later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, torch.device]] = []
    module = torch.get_device_module(device)
    set_device = module.set_device

    def noted(to: torch.device) -> None:
        given.append((threading.current_thread().name, to))
        set_device(to)

    monkeypatch.setattr(module, "set_device", noted)
    policy = SavePolicy(asynchronous=True, later=later)
    saver = Saver(AloneCollectives(), LocalNoticeboard(), device=device, policy=policy, fence=Fence())
    try:
        for value in (3.0, 4.0):
            state = wanted_on(device, value)
            saver.save(tmp_path, f"step{value}", lambda state=state: state, progress=nothing)
            saver.fence.wait_all()
            for entry in state.entries:
                entry.tensor.zero_()  # training goes on
            saver.finish(nothing)
            assert value_of(tmp_path / f"step{value}") == value
        image = saver._beside._staging._image
        assert device.type == "cpu" or image.is_pinned()
    finally:
        saver.close(nothing)
    assert given == [("save step3.0", device), ("save step4.0", device)]
