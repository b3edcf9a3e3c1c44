"""A drive written and read beside dd, fio and DeepSpeed's aio; then an optimizer's step whose states are on it.

The folder is $DSRUN_NVME_PATH, or else the present one. All leave the page cache out. dd moves 16 MiB at a time, from
and to memory of its own, its start included; fio has as many bytes under way as dsrun's defaults: blocks of 1 MiB, 8 at
once. A first pass lays the files down and does not count. The floor of the step reads and writes as many bytes at once,
by dsrun's own file, and steps nothing.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zero_peers.figures import Figures

import dsrun
from dsrun.direct_io.buffers import huge_buffer
from dsrun.direct_io.extent_file import Extent, ExtentFile
from dsrun.direct_io.pending import PendingIo
from dsrun.direct_io.settings import IoSettings

from .options import Options

_HERE = Path(__file__).resolve().parent
_MIB = 1 << 20
_BYTES, _QUICK_BYTES = 1 << 30, 16 * _MIB
#: Of each of the model's layers, and how many there are.
_WIDTH, _QUICK_WIDTH, _LAYERS = 2896, 256, 8
_ANSWER_S = 300.0

_Move = Callable[[], float]


def measure(options: Options) -> list[Figures]:
    """Times passes over a file each way, and steps."""
    nbytes = _QUICK_BYTES if options.quick else _BYTES
    with ExitStack() as stack:
        root = os.environ.get("DSRUN_NVME_PATH", ".")
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=root, prefix="dsrun-bench-"))
        return [*_files(folder, nbytes, options, stack), _steps(folder, options)]


def _files(folder: str, nbytes: int, options: Options, stack: ExitStack) -> list[Figures]:
    contenders: dict[str, dict[str, _Move]] = {
        "dsrun": _dsrun(folder, nbytes, stack),
        "dd": _dd(os.path.join(folder, "dd"), nbytes),
    }
    if shutil.which("fio") is not None:
        contenders["fio"] = _fio(os.path.join(folder, "fio"), nbytes)
    if options.peer_python is not None:
        contenders["DeepSpeed"] = _deepspeed(options.peer_python, os.path.join(folder, "ds"), nbytes, stack)
    tables: list[Figures] = []
    for way in ("write", "read"):
        table = Figures(f"{way.capitalize()} {nbytes >> 20} MiB on a drive", "ms", {row: [] for row in contenders})
        rows = list(contenders)
        for round_ in range(options.runs + 1):
            turn = round_ % len(rows)
            for row in [*rows[turn:], *rows[:turn]]:
                took_s = contenders[row][way]()
                if round_:
                    table.add(row, took_s * 1e3)
        for row in rows:
            table.notes[row] = f"{nbytes / table.median(row) / 1e6:.2f} GB/s"
        for row, least in (("dd", 0.9), ("fio", 0.9), ("DeepSpeed", 1.0)):
            table.demand_ratio(row, "dsrun", least=least)
        tables.append(table)
    return tables


def _dsrun(folder: str, nbytes: int, stack: ExitStack) -> dict[str, _Move]:
    file = ExtentFile([folder], IoSettings(), what="the measurement")
    stack.callback(file.close)
    extent = file.reserve("all", nbytes)
    file.allocate()
    buffer = _noise(nbytes)
    return {
        "write": _timed(lambda: file.write(extent, buffer).wait()),
        "read": _timed(lambda: file.read(extent, buffer).wait()),
    }


def _dd(path: str, nbytes: int) -> dict[str, _Move]:
    block = min(16 * _MIB, nbytes)
    sizes = [f"bs={block}", f"count={nbytes // block}"]
    write = ["dd", "if=/dev/zero", f"of={path}", *sizes, "oflag=direct", "conv=notrunc"]
    read = ["dd", f"if={path}", "of=/dev/null", *sizes, "iflag=direct"]
    return {"write": _timed(lambda: _run(write)), "read": _timed(lambda: _run(read))}


def _fio(path: str, nbytes: int) -> dict[str, _Move]:
    def move(way: str) -> float:
        words = ["fio", "--name=bench", f"--filename={path}", f"--rw={way}", f"--size={nbytes}", "--bs=1M"]
        words += ["--iodepth=8", "--ioengine=libaio", "--direct=1", "--overwrite=1", "--output-format=json"]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return json.loads(done.stdout)["jobs"][0][way]["runtime"] / 1e3  # without its start, which dd's has

    return {"write": lambda: move("write"), "read": lambda: move("read")}


def _deepspeed(python: str, path: str, nbytes: int, stack: ExitStack) -> dict[str, _Move]:
    Path(path).write_bytes(b"")
    words = [python, str(_HERE / "deepspeed_aio.py"), path, str(nbytes)]
    process: Any = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        process.stdin.close()
        process.wait(_ANSWER_S)

    def answer() -> Any:
        ready = select.select([process.stdout], [], [], _ANSWER_S)[0]
        line = process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError("DeepSpeed's process gives no answer; what it said is above (aio needs libaio)")
        return json.loads(line)

    def ask(way: str) -> float:
        process.stdin.write(f"{way}\n")
        process.stdin.flush()
        return answer()

    stack.callback(end)
    if answer() != "ready":
        raise RuntimeError("DeepSpeed's process says something else than that it is ready")
    return {"write": lambda: ask("write"), "read": lambda: ask("read")}


def _steps(folder: str, options: Options) -> Figures:
    """Times updates of a model whose states are on the drive, from the norm to the last byte."""
    width = _QUICK_WIDTH if options.quick else _WIDTH
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(_LAYERS)])
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": folder}},
    }
    engine: Any = dsrun.initialize(model=model, config=settings)[0]
    inputs = torch.randn(1, width, dtype=torch.bfloat16)
    numel = sum(param.numel() for param in model.parameters())
    floor = _Floor(folder, 12 * numel // _LAYERS // 4096 * 4096)
    table = Figures(f"A step of {numel / 1e6:.0f}M parameters with states on a drive", "ms", {"floor": [], "step": []})
    for round_ in range(options.runs + 2):
        engine.backward(engine(inputs).float().square().mean())
        before = engine.counters()
        began_s = time.perf_counter()
        engine.step()
        engine._update.away.settle()
        took_s = time.perf_counter() - began_s
        moved = engine.counters().since(before).drives
        floor_s = floor.run()
        if round_ > 1:  # the first step reads masters alone
            table.add(
                "step",
                took_s * 1e3,
                f"{moved.read_bytes / numel:.1f} B read, {moved.written_bytes / numel:.1f} B written a parameter",
            )
            table.add("floor", floor_s * 1e3)
    engine.destroy()
    floor.close()
    table.demand_ratio("floor", "step", least=0.8)
    return table


class _Floor:
    """Reads and writes at once what a step does, in as many pieces."""

    def __init__(self, folder: str, piece_bytes: int) -> None:
        self._file = ExtentFile([folder], IoSettings(), what="the floor")
        self._extents = [self._file.reserve(f"piece {number}", piece_bytes) for number in range(_LAYERS)]
        self._file.allocate()
        self._buffers = [_noise(piece_bytes) for _ in range(4)]
        for extent in self._extents:
            self._file.write(extent, self._buffers[0]).wait()

    def run(self) -> float:
        """Returns the seconds of one pass."""
        began_s = time.perf_counter()
        reads: deque[tuple[Extent, PendingIo]] = deque()
        writes: deque[PendingIo] = deque()
        for number, extent in enumerate(self._extents):
            reads.append((extent, self._file.read(extent, self._buffers[number % 2])))
            if len(reads) > 1:
                self._write_back(*reads.popleft(), writes)
        self._write_back(*reads.popleft(), writes)
        for pending in writes:
            pending.wait()
        return time.perf_counter() - began_s

    def _write_back(self, extent: Extent, read: PendingIo, writes: deque[PendingIo]) -> None:
        read.wait()
        if len(writes) > 1:
            writes.popleft().wait()
        writes.append(self._file.write(extent, self._buffers[2 + len(writes) % 2]))

    def close(self) -> None:
        self._file.close()


def _noise(nbytes: int) -> memoryview:
    """Returns memory with what no disk can shorten."""
    buffer = memoryview(huge_buffer(nbytes))
    for at in range(0, nbytes, _MIB):
        part = buffer[at : at + _MIB]
        part[:] = os.urandom(part.nbytes)
    return buffer


def _run(words: list[str]) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _timed(act: Callable[[], Any]) -> _Move:
    def move() -> float:
        began_s = time.perf_counter()
        act()
        return time.perf_counter() - began_s

    return move
