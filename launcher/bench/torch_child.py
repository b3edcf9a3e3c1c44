"""The process that measures with torch: copies between host and GPUs, and matrix products. One JSON line on stdout.

The launcher imports no torch, so this is a process of its own, of the interpreter whose torch jobs would use. Started
by `gpu.py`, which gives it a time-out; dies with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..processes import die_with_parent
from .figure import LEAST_REPETITIONS, Figure, figure

_COPY_BYTES = 256 << 20
#: Of the square matrices: large enough that the product is bound by arithmetic.
_GPU_SIDE, _CPU_SIDE = 8192, 1024
_REPETITION_S = 0.1


def main() -> None:
    """Entry of the process; its one argument is the parent's pid."""
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    # What torch or a driver prints must not come between the figures.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    figures = list(gpu_figures() if torch.cuda.is_available() else cpu_figures())
    with open(answer_fd, "w") as answer:
        json.dump({"torch": torch.__version__, "figures": [one.to_json() for one in figures]}, answer)


def cpu_figures(*, side: int = _CPU_SIDE, repetition_s: float = _REPETITION_S) -> Iterator[Figure]:
    """Yields rates of matrix products on the cores that torch uses here.

    Args:
        side: number of rows and columns of the square matrices.
        repetition_s: shortest length of one.
    """
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        left, right = (torch.randn(side, side).to(dtype) for _ in range(2))
        product = torch.empty_like(left)

        def multiply(left: Any = left, right: Any = right, product: Any = product) -> None:
            torch.mm(left, right, out=product)

        title = f"{name} matrix product, CPU, {torch.get_num_threads()} threads"
        yield figure(title, "FLOP/s", _rates(multiply, 2 * side**3, lambda: None, repetition_s))


def gpu_figures(
    *, copy_bytes: int = _COPY_BYTES, side: int = _GPU_SIDE, repetition_s: float = _REPETITION_S
) -> Iterator[Figure]:
    """Yields rates of pinned copies and of matrix products for each GPU that is visible, and copies of all at once.

    Args:
        copy_bytes: bytes of one copy.
        side: number of rows and columns of the square matrices.
        repetition_s: shortest length of one.
    """
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    copies = {device: _Copies(device, copy_bytes) for device in devices}

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    for title, one in (("host to GPU", _Copies.up), ("GPU to host", _Copies.down)):
        for device in devices:
            rates = _rates(lambda one=one, device=device: one(copies[device]), copy_bytes, wait, repetition_s)
            yield figure(f"{title} {device.index}", "B/s", rates)
        if len(devices) > 1:

            def of_all(one: Callable[[_Copies], None] = one) -> None:
                for device in devices:
                    one(copies[device])

            rates = _rates(of_all, copy_bytes * len(devices), wait, repetition_s)
            yield figure(f"{title}, all {len(devices)} at once", "B/s", rates)
    copies.clear()
    for device in devices:
        left, right = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)

        def multiply(left: Any = left, right: Any = right, product: Any = product) -> None:
            torch.mm(left, right, out=product)

        rates = _rates(multiply, 2 * side**3, wait, repetition_s)
        yield figure(f"bf16 matrix product, GPU {device.index}", "FLOP/s", rates)


class _Copies:
    """Buffers on both sides of one GPU's link, and a stream, so that copies of several GPUs overlap."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)

    def up(self) -> None:
        """Starts a copy to the GPU."""
        with torch.cuda.stream(self._stream):
            self._device.copy_(self._host, non_blocking=True)

    def down(self) -> None:
        """Starts a copy from the GPU."""
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._device, non_blocking=True)


def _rates(work: Callable[[], None], amount: int, wait: Callable[[], None], repetition_s: float) -> list[float]:
    """Returns amounts a second, once a repetition, after a first round that is not counted.

    Args:
        work: function that starts one round.
        amount: bytes or operations of one round.
        wait: function that returns once the started work is done.
        repetition_s: shortest length of a repetition.
    """
    work()
    wait()
    begun_s = time.perf_counter()
    work()
    wait()
    rounds = max(1, int(repetition_s / (time.perf_counter() - begun_s)))
    rates: list[float] = []
    for _ in range(LEAST_REPETITIONS):
        begun_s = time.perf_counter()
        for _ in range(rounds):
            work()
        wait()
        rates.append(rounds * amount / (time.perf_counter() - begun_s))
    return rates
