"""Memory is locked and unlocked once, and a refusal leaves no error behind for the next kernel."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import dsrun
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.memory.page_lock import CannotLock, CudaLock, lock_until_gone
from support.fake_cuda import FakeCuda
from support.torch_builds import cuda_build

CPU = torch.device("cpu")


def test_a_refusal_is_taken_back_and_memory_stays_pageable() -> None:
    cuda, said = FakeCuda(refuses=2), list[str]()
    pool = HostPool(CudaLock(CPU, calls=cuda), say=said.append)
    assert bool((pool.zeros(1000, dtype=torch.float32).fill_(2) == 2).all())
    assert cuda.last_error == 0, "the next launch of a kernel would fail with it"
    assert not pool.pins
    assert ["cudaHostRegister: out of memory" in line for line in said] == [True]


def test_memory_is_unlocked_once_when_its_owner_says_so_or_is_gone() -> None:
    cuda = FakeCuda()
    lock = CudaLock(CPU, calls=cuda)
    first, second = torch.zeros(256), torch.zeros(512)
    end = lock_until_gone(first, lock)
    lock_until_gone(second, lock)
    assert sorted(cuda.locked.values()) == [1024, 2048]
    end()
    end()
    assert list(cuda.locked.values()) == [2048]
    del first, second
    gc.collect()
    assert cuda.locked == {}
    assert cuda.last_error == 0


def test_memory_that_cannot_be_unlocked_leaves_no_error_either() -> None:
    cuda = FakeCuda()
    unlock = CudaLock(CPU, calls=cuda)(4096, 100)
    cuda.locked.clear()
    unlock()
    assert cuda.last_error == 0


def test_a_refused_lock_is_raised_to_who_can_go_on_without() -> None:
    with pytest.raises(CannotLock, match=r"^cudaHostRegister: out of memory$"):
        lock_until_gone(torch.zeros(8), CudaLock(CPU, calls=FakeCuda(refuses=2)))


_ASKED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from dsrun.runtime.memory.page_lock import _last_error
status = int(torch._C._cudart.cudaHostRegister(1, 4096, 0))
print(status != 0, _last_error() == status)
"""


def test_the_runtime_that_torch_is_linked_to_is_the_one_that_is_asked() -> None:
    src = Path(dsrun.__file__).resolve().parents[1]
    done = subprocess.run(
        [cuda_build(), "-W", "ignore", "-c", _ASKED, str(src)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "True True\n", done.stderr


_REFUSED = """
import torch
from dsrun.runtime.memory import page_lock
from dsrun.runtime.memory.page_lock import CannotLock, CudaLock
{before}
device = torch.device("cuda", 0)
assert bool((torch.zeros(8, device=device) + 1 == 1).all())
lock = CudaLock(device)
memory = torch.zeros(1 << 20)
unlock = lock(memory.data_ptr(), memory.nbytes)
for address, nbytes in ((memory.data_ptr(), memory.nbytes), (1, 4096)):
    try:
        lock(address, nbytes)
    except CannotLock as error:
        print(error)
    else:
        raise AssertionError("CUDA has locked it twice, or what is not there")
    assert bool((torch.zeros(8, device=device) + 1 == 1).all())
unlock()
unlock()  # refused
assert bool((torch.zeros(8, device=device) + 1 == 1).all())
"""


#: What is changed before: nothing; the runtime cannot be asked for its last error; the error is not taken back.
_BEFORE = {
    "the runtime is asked": "",
    "a launch takes it": "page_lock._last_error = lambda: None",
    "nobody takes it": "page_lock._CudaCalls.forget = lambda self, status: None",
}


@pytest.fixture(scope="module")
def refused() -> dict[str, subprocess.CompletedProcess[str]]:
    """How processes ended in which a lock was refused: they run at once, for each is seconds of imports."""
    with ExitStack() as stack:
        running: dict[str, subprocess.Popen[str]] = {}
        for name, before in _BEFORE.items():
            command = [sys.executable, "-c", _REFUSED.format(before=before)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            running[name] = stack.enter_context(process)
            stack.callback(process.kill)
        said = {name: process.communicate(timeout=25) for name, process in running.items()}
        return {
            name: subprocess.CompletedProcess(process.args, process.returncode, *said[name])
            for name, process in running.items()
        }


@pytest.mark.cuda
@pytest.mark.gpu_seconds(2)
@pytest.mark.parametrize("before", ["the runtime is asked", "a launch takes it"])
def test_kernels_run_behind_a_refused_lock(before: str, refused: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = refused[before]
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cudaHostRegister: ") == 2


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.1)
def test_without_taking_it_back_the_next_kernel_fails(refused: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """What the others rest on: CUDA's error outlives the call, as they presume."""
    done = refused["nobody takes it"]
    assert done.returncode != 0
    assert "CUDA error" in done.stderr
