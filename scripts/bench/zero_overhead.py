"""What ZeRO costs the host a block and micro step: forward and backward of an engine minus those of the plain model.

    python scripts/bench/zero_overhead.py [--stages 0 1 2 3] [--ranks 1 2] [--runs 100] [--hidden 16] [--json]

The model is small on purpose (24 blocks of 10 modules and 16 parameters, hidden 16), so that what is measured is
bookkeeping. One thread a rank. Plain model and engines take turns in one process, a micro step each, so that all meet
the same machine, and each meets it now and then when nobody else does. Seconds on the wall and of the process's CPU;
the figure is the difference to the plain model a block, of the medians and of the least. With several ranks the time
inside of collectives is taken out of both clocks, calls and waiting alike: what is left is what the runtime does around
them. `step` is one optimizer step's time, whole.

Caveats: at one rank collectives are in the figure (nothing has to be moved, but the calls are made). Gradients of the
plain model are set to None before each run, as `optimizer.zero_grad()` does; the engine accumulates micro steps.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import dsrun
from dsrun.contract.environment import RankInfo
from dsrun.runtime.compat import TCPStore
from dsrun.runtime.mesh.collectives import Pending
from dsrun.runtime.mesh.host_memory.collectives import SharedMemoryCollectives


class Block(nn.Module):
    """A transformer block's modules and parameters, without attention's arithmetic."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, hidden] to the same."""
        h = self.norm1(x)
        x = x + self.out(self.query(h) * self.key(h) + self.value(h))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Stack(nn.Module):
    """`blocks` blocks."""

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """[B, hidden] to the same."""
        for block in self.blocks:
            x = block(x)
        return x


class Excluded:
    """Seconds spent inside of collectives, on both clocks."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.cpu_s = 0.0

    @contextlib.contextmanager
    def apart(self) -> Generator[None]:
        """Counts what runs inside as a collective's."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - wall_s
        self.cpu_s += time.process_time() - cpu_s

    def watch(self) -> None:
        """Takes the collectives of shared memory, which are over when they return, out of what is measured."""
        excluded = self

        def timed(call: Callable[..., Pending]) -> Callable[..., Pending]:
            def run(*args: Any, **kwargs: Any) -> Pending:
                with excluded.apart():
                    return call(*args, **kwargs)

            return run

        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            setattr(SharedMemoryCollectives, name, timed(getattr(SharedMemoryCollectives, name)))


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds a block of one clock: of the median run and of the least, and between the quartiles of the runs."""

    median_us: float
    least_us: float
    spread_us: float


@dataclass(frozen=True, slots=True)
class Row:
    """One variant at one number of ranks; overheads are differences to the plain model in the same process."""

    ranks: int
    variant: str
    wall: Figure
    cpu: Figure
    wall_overhead_us: float
    cpu_overhead_us: float
    least_overhead_us: float
    step_us: float | None


def measure_rank(rank: int, size: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """Runs all variants on one rank; rank 0 puts its rows into `results`."""
    info = RankInfo(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, master_port=port, agent_store=True
    )
    os.environ.update(info.to_env())
    torch.set_num_threads(1)
    excluded = Excluded()
    if size > 1:
        excluded.watch()
    rows = _measure(size, options, excluded)
    if rank == 0:
        results.put(rows)


def _measure(size: int, options: argparse.Namespace, excluded: Excluded) -> list[Row]:
    x = torch.randn(options.batch, options.hidden)
    plain = Stack(options.blocks, options.hidden)

    def run_plain() -> None:
        plain(x).pow(2).mean().backward()

    def forget() -> None:
        for param in plain.parameters():
            param.grad = None

    runs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {"plain": (run_plain, forget)}
    for stage in options.stages:
        engine = _engine(stage, options)

        def run(engine: Any = engine) -> None:
            engine.backward(engine(x).pow(2).mean())

        runs[f"stage {stage}"] = (run, engine.step)
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    steps: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(options.runs + options.warmup):
        gc.collect()
        for name, (micro_step, after) in runs.items():
            before = excluded.wall_s, excluded.cpu_s
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            micro_step()
            taken_wall = time.perf_counter() - wall_s - (excluded.wall_s - before[0])
            taken_cpu = time.process_time() - cpu_s - (excluded.cpu_s - before[1])
            step_s = time.perf_counter()
            after()
            step_s = time.perf_counter() - step_s
            if round_ >= options.warmup:
                wall[name].append(taken_wall / options.blocks * 1e6)
                cpu[name].append(taken_cpu / options.blocks * 1e6)
                steps[name].append(step_s * 1e6)
    return [
        Row(
            size,
            name,
            _figure(wall[name]),
            _figure(cpu[name]),
            statistics.median(wall[name]) - statistics.median(wall["plain"]),
            statistics.median(cpu[name]) - statistics.median(cpu["plain"]),
            min(cpu[name]) - min(cpu["plain"]),
            None if name == "plain" else statistics.median(steps[name]),
        )
        for name in runs
    ]


def _engine(stage: int, options: argparse.Namespace) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }
    with contextlib.redirect_stdout(sys.stderr):
        return dsrun.initialize(model=Stack(options.blocks, options.hidden), config=config)[0]


def _figure(values: list[float]) -> Figure:
    quartiles = statistics.quantiles(values, n=4)
    return Figure(statistics.median(values), min(values), quartiles[2] - quartiles[0])


def main() -> None:
    """Starts the ranks and prints a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    context = get_context("spawn")
    for size in options.ranks:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        results: Any = context.SimpleQueue()
        spawn(measure_rank, (size, store.port, options, results), nprocs=size)
        rows += results.get()
    if options.json:
        about = {"torch": torch.__version__, "cpus": os.cpu_count(), **vars(options)}
        print(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}))
        return
    print(f"{options.blocks} blocks, hidden {options.hidden}; us a block and micro step (step: us)\n")
    print(
        "| ranks | variant | wall median | wall least | cpu median | cpu least | cpu quartiles apart "
        "| over plain: wall | cpu | cpu least | step |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        step = "" if row.step_us is None else f"{row.step_us:.0f}"
        print(
            f"| {row.ranks} | {row.variant} | {row.wall.median_us:.1f} | {row.wall.least_us:.1f} "
            f"| {row.cpu.median_us:.1f} | {row.cpu.least_us:.1f} | {row.cpu.spread_us:.1f} "
            f"| {row.wall_overhead_us:.1f} | {row.cpu_overhead_us:.1f} | {row.least_overhead_us:.1f} | {step} |"
        )


if __name__ == "__main__":
    main()
