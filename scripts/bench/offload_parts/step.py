"""The optimizer's step on the host, bf16 gradient to bf16 parameter, with a clip factor, in one run of neighbours.

The floor moves the same bytes and computes next to nothing, in as many threads: a compiled loop where there is a
compiler. Without one torch's fused kernel stands for it, over fp32 gradients, without scale and without a parameter: as
many bytes, and it was found at the limit. `one pass` is dsrun without a compiler, `compiled` with one; `passes of
torch` is what one would write by hand: widen, scale, the fused kernel on the whole range, round. DeepSpeed finds its
gradients in fp32 already, so what it does is less. Weights come out the same, ours to the bit; the order turns each
round, and a figure is the least of three steps.
"""

from __future__ import annotations

import ctypes
import json
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn, optim
from zero_peers.figures import Figures

from dsrun.errors import DsrunError
from dsrun.runtime.compat import fused_adam
from dsrun.runtime.offload.step.build_pass import build_pass
from dsrun.runtime.offload.step.compiled_adam import CompiledAdam, load_pass
from dsrun.runtime.offload.step.torch_adam import AdamBlocks
from dsrun.runtime.offload.step.ways import RangeWork, block_step_for

from .options import Options

_HERE = Path(__file__).resolve().parent
_NUMEL, _QUICK_NUMEL = 1 << 26, 1 << 20
#: What moves of an element: gradient, mean, square and weight in, the last three and a parameter out.
_BYTES = 28
_SCALE = 0.37
_TRIES = 3
_ANSWER_S = 300.0
_NEAR = 1e-4

_Step = Callable[[], float]


def measure(options: Options) -> list[Figures]:
    """Times steps of one range.

    Raises:
        RuntimeError: contenders come to other weights.
    """
    numel = _QUICK_NUMEL if options.quick else _NUMEL
    torch.set_num_threads(options.threads)
    table = Figures(f"A step of {numel / 1e6:.0f}M parameters on the host, {options.threads} threads", "ms")
    with ExitStack() as stack:
        ways: dict[str, _Step] = {}
        floor, note = _floor(numel, options.threads)
        ways["floor"] = floor
        ways |= _ours(numel, options.threads, stack)
        if options.peer_python is not None:
            ways["DeepSpeed"] = stack.enter_context(_DeepSpeed(options.peer_python, numel, options.threads))
        rows = list(ways)
        table.values |= {row: [] for row in rows}
        for round_ in range(options.runs + 1):
            turn = round_ % len(rows)
            for row in [*rows[turn:], *rows[:turn]]:
                least_s = min(ways[row]() for _ in range(_TRIES))
                if round_:
                    table.add(row, least_s * 1e3)
    for row in rows:
        speed = f"{_BYTES * numel / table.median(row) / 1e6:.1f} GB/s, {table.ratio('floor', row):.2f} of the floor"
        table.notes[row] = f"{speed}; {note}" if row == "floor" else speed
    table.demand_ratio("floor", "one pass", least=0.8)
    table.demand_ratio("DeepSpeed", "one pass", least=1.4)
    table.demand_ratio("floor", "compiled", least=0.9)
    table.demand_ratio("DeepSpeed", "compiled", least=1.4)
    table.demand_ratio("passes of torch", "one pass", least=1.0)
    return [table]


class _State:
    """A range of its own for a contender: the same weights and gradients for all."""

    def __init__(self, numel: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.weights = torch.randn(numel, generator=draw)
        self.grads = torch.randn(numel, generator=draw).bfloat16()
        self.states = {name: torch.zeros(numel) for name in ("exp_avg", "exp_avg_sq")}
        self.scalars: dict[str, Any] = {"step": torch.tensor(0.0)}
        self.params = torch.empty(numel, dtype=torch.bfloat16)

    def work(self, options: dict[str, Any]) -> RangeWork:
        return RangeWork(self.weights, self.grads, self.states, self.scalars, options, _SCALE, self.params)


def _ours(numel: int, threads: int, stack: ExitStack) -> dict[str, _Step]:
    """Returns dsrun's ways and torch's, each on memory of its own, once they have come to the same bits."""
    optimizer = optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.01, fused=True)
    options = optimizer.param_groups[0]
    ways = {"one pass": block_step_for(optimizer, threads=threads, compiled=False).step}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    try:
        blocks = AdamBlocks(1 << 20, threads=threads)
        ways["compiled"] = CompiledAdam(load_pass(build_pass(folder)), blocks, threads=threads).step
    except DsrunError as error:
        print(f"without the compiled pass: {error}\n")
    ways["passes of torch"] = _Passes(numel).step
    steps: dict[str, _Step] = {}
    first: _State | None = None
    for row, way in ways.items():
        state = _State(numel)
        way(state.work(options))
        if first is None:
            first = state
        elif not (torch.equal(first.weights, state.weights) and torch.equal(first.params, state.params)):
            raise RuntimeError(f"{row} comes to other weights than {next(iter(ways))}")
        steps[row] = _timed(lambda way=way, state=state: way(state.work(options)))
    return steps


class _Passes:
    """Widen and scale, the fused kernel, round: each over the whole range."""

    def __init__(self, numel: int) -> None:
        self._gradient = torch.empty(numel)

    def step(self, work: RangeWork) -> None:
        self._gradient.copy_(work.grads_N).mul_(work.grad_scale)
        assert isinstance(work.master_N, Tensor)
        assert work.params_out_N is not None
        kernel = fused_adam(work.options, work.scalars["step"].add_(1))
        kernel(work.master_N, self._gradient, list(work.states.values()))
        work.params_out_N.copy_(work.master_N)


def _floor(numel: int, threads: int) -> tuple[_Step, str]:
    """Returns what the same bytes cost, and how that is found out."""
    state = _State(numel)
    means, squares = state.states.values()
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        optimizer = optim.AdamW([nn.Parameter(state.weights)], fused=True)
        gradient = state.grads.float()
        kernel = fused_adam(optimizer.param_groups[0], state.scalars["step"].add_(1))
        return _timed(
            lambda: kernel(state.weights, gradient, [means, squares])
        ), "torch's fused kernel in fp32, for want of a compiler"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stream.so"
        words = [
            compiler,
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            str(_HERE / "adam_stream.cpp"),
            "-o",
            str(library),
        ]
        subprocess.run(words, check=True)
        stream: Any = ctypes.CDLL(str(library)).adam_stream
    stream.argtypes = [ctypes.c_size_t, *[ctypes.c_void_p] * 5]
    pool = ThreadPoolExecutor(threads)
    tensors = (state.grads, means, squares, state.weights, state.params)

    def part(index: int) -> None:
        first, last = numel * index // threads, numel * (index + 1) // threads
        stream(last - first, *(t.data_ptr() + first * t.element_size() for t in tensors))

    return _timed(lambda: list(pool.map(part, range(threads)))), "a compiled loop"


class _DeepSpeed:
    """DeepSpeed in a process of its own, a step for each call."""

    def __init__(self, python: str, numel: int, threads: int) -> None:
        words = [python, str(_HERE / "deepspeed_step.py"), str(numel), str(threads), str(_SCALE)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # The same rule as ours, from the same numbers; its kernel rounds otherwise.
        state = _State(numel)
        optimizer = optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.01, fused=True)
        AdamBlocks(1 << 20, threads=threads).step(state.work(optimizer.param_groups[0]))
        self._expected = state.weights[:8].clone()

    def __enter__(self) -> _Step:
        if self._answer() != "ready":
            raise RuntimeError("DeepSpeed's process says something else than that it is ready")
        weights = torch.tensor(self._ask()[1])
        if not torch.allclose(weights, self._expected, atol=_NEAR):
            raise RuntimeError(f"DeepSpeed comes to other weights: {weights}, not {self._expected}")
        return lambda: self._ask()[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], _ANSWER_S)[0]
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError("DeepSpeed's process gives no answer; what it said is above")
        return json.loads(line)


def _timed(act: Callable[[], Any]) -> _Step:
    def step() -> float:
        began_s = time.perf_counter()
        act()
        return time.perf_counter() - began_s

    return step
