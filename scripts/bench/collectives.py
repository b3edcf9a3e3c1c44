"""What moves the data of CPU ranks on one host: memory they share, beside Gloo and beside what copying takes at least.

    python scripts/bench/collectives.py [--ranks 2] [--runs 9] [--mib 4 64] [--json FILE]

Interleaved in one process a rank, one thread each. Each row is one collective on one buffer: median, least and most of
rank 0's times, how many times faster it is than Gloo's own call of the same round, and which part of the floor's speed
it has. The floor moves the same bytes without any meeting, by all ranks at once: for a gather a copy of the buffer, for
a reduce-scatter the sum of a rank's slices. Below, what pages cost: a copy of memory in pages of 4 KiB and of 2 MiB.
Takes less than a minute on two idle cores. See decisions 0006 and 0015.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from dsrun.runtime.compat import TCPStore, all_gather_single, reduce_scatter_single
from dsrun.runtime.mesh.c10d import GlooCollectives
from dsrun.runtime.mesh.collectives import own_slice
from dsrun.runtime.mesh.host_memory.collectives import SharedMemoryCollectives
from dsrun.runtime.mesh.sums import reduce_in_order

#: What the project demands of collectives in shared memory.
TIMES_GLOO = 8.0
PART_OF_FLOOR = 0.6
#: The two that the bars are about.
GATHER, REDUCE = "all-gather, in shared memory", "reduce-scatter, in shared memory"
#: Rows that others are compared with: a collective's floor and Gloo's own call.
FLOORS = {"all-gather": "floor: a copy of the buffer", "reduce-scatter": "floor: the sum of the slices"}
GLOO = {"all-gather": "all-gather, Gloo's own", "reduce-scatter": "reduce-scatter, Gloo's own"}
_SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

Row = dict[str, Any]


def time_rank(rank: int, size: int, port: int, runs: int, sizes_mib: Sequence[int], output: str | None) -> None:
    """Times every collective on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    ours = GlooCollectives(group)
    shared = SharedMemoryCollectives(group, timeout_s=60)
    rows: list[Row] = []
    for mib in sizes_mib:
        for dtype in (torch.float32, torch.bfloat16):
            label = f"{mib} MiB {str(dtype).removeprefix('torch.')}"
            rows += _judged(label, _time(shared, ours, group, mib=mib, dtype=dtype, runs=runs))
    pages = _time_pages(shared, runs) if max(sizes_mib) >= 1 else []
    if rank == 0:
        print(_table(size, runs, rows, pages))
        if output is not None:
            Path(output).write_text(json.dumps({"ranks": size, "runs": runs, "rows": rows, "pages": pages}, indent=1))
    shared.barrier()
    shared.close()
    dist.destroy_process_group()


def _time(
    shared: SharedMemoryCollectives,
    ours: GlooCollectives,
    group: dist.ProcessGroup,
    *,
    mib: int,
    dtype: torch.dtype,
    runs: int,
) -> dict[str, list[float]]:
    """Returns milliseconds of each run, by row."""
    rank, size = shared.rank, shared.size
    buffer = torch.ones(mib * 2**20 // dtype.itemsize // size * size, dtype=dtype)
    shard = own_slice(buffer, rank=rank, size=size).clone()
    other = torch.empty_like(buffer)
    near = shared.zeros(buffer.numel(), dtype=dtype, device=torch.device("cpu"))
    near_shard = shared.zeros(shard.numel(), dtype=dtype, device=torch.device("cpu"))
    slices = [own_slice(buffer, rank=peer, size=size) for peer in range(size)]
    total = own_slice(other, rank=rank, size=size)
    calls: dict[str, Callable[[], object]] = {
        FLOORS["all-gather"]: lambda: other.copy_(buffer),
        FLOORS["reduce-scatter"]: lambda: reduce_in_order(slices, total, "sum"),
        GATHER: lambda: shared.all_gather(buffer, near_shard).wait(),
        "all-gather, through the mailbox": lambda: shared.all_gather(buffer, shard).wait(),
        GLOO["all-gather"]: lambda: all_gather_single(buffer, shard, group=group),
        "all-gather, Gloo by broadcasts": lambda: ours.all_gather(buffer, shard).wait(),
        REDUCE: lambda: shared.reduce_scatter(near).wait(),
        "reduce-scatter, through the mailbox": lambda: shared.reduce_scatter(buffer).wait(),
        GLOO["reduce-scatter"]: lambda: reduce_scatter_single(shard, buffer, group=group),
        "reduce-scatter, Gloo by an all-reduce": lambda: ours.reduce_scatter(buffer).wait(),
    }
    return _interleave(calls, shared, runs, before=lambda: (buffer.fill_(1), near.fill_(1)))


def _interleave(
    calls: dict[str, Callable[[], object]],
    shared: SharedMemoryCollectives,
    runs: int,
    before: Callable[[], object],
) -> dict[str, list[float]]:
    """Times all calls in turn, as often as `runs` says after a first round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(runs + 1):
        for name, call in calls.items():
            before()
            shared.barrier()
            started_s = time.perf_counter()
            call()
            if round_:
                found[name].append((time.perf_counter() - started_s) * 1e3)
    return found


def _time_pages(shared: SharedMemoryCollectives, runs: int) -> list[Row]:
    """Times a copy of 64 MiB in pages of both sizes, in memory of this process alone."""
    nbytes = 64 << 20
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, advice in (("4 KiB", mmap.MADV_NOHUGEPAGE), ("2 MiB", mmap.MADV_HUGEPAGE)):
        made: list[Tensor] = []
        for _ in range(2):
            # Private memory, for that is where the kernel gives huge pages without being told for the whole machine.
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(advice)
            made.append(torch.frombuffer(memory, dtype=torch.uint8).fill_(1))
        pairs[name] = (made[0], made[1])
    calls: dict[str, Callable[[], object]] = {
        f"copy of 64 MiB, pages of {name}": lambda pair=pair: pair[0].copy_(pair[1]) for name, pair in pairs.items()
    }
    found = _interleave(calls, shared, runs, before=lambda: None)
    return [_row("", name, values) for name, values in found.items()]


def _row(label: str, name: str, values: Sequence[float]) -> Row:
    return {"buffer": label, "what": name, "median_ms": statistics.median(values), "ms": list(values)}


def _judged(label: str, found: dict[str, list[float]]) -> list[Row]:
    """Returns the rows of one buffer with ratios of the same rounds, and whether the bars are met."""
    rows: list[Row] = []
    for name, values in found.items():
        row = _row(label, name, values)
        collective = name.partition(",")[0]
        if collective in GLOO:
            row["times_gloo"] = _ratio(found[GLOO[collective]], values)
            row["part_of_floor"] = _ratio(found[FLOORS[collective]], values)
        if name in (GATHER, REDUCE):
            row["met"] = row["times_gloo"] >= TIMES_GLOO and row["part_of_floor"] >= PART_OF_FLOOR
        rows.append(row)
    return rows


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


def _table(size: int, runs: int, rows: Sequence[Row], pages: Sequence[Row]) -> str:
    bar = f">= {TIMES_GLOO:g} x Gloo, >= {PART_OF_FLOOR:g} of the floor"
    lines = [
        f"{size} ranks, {runs} runs\n",
        f"| buffer | what | median ms | least to most | x Gloo | part of floor | {bar} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in [*rows, *pages]:
        ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("times_gloo", "part_of_floor")]
        met = {True: "met", False: "**not met**", None: ""}[row.get("met")]
        spread = f"{min(row['ms']):.2f} to {max(row['ms']):.2f}"
        cells = [row["buffer"], row["what"], f"{row['median_ms']:.2f}", spread, *ratios, met]
        lines.append(f"| {' | '.join(cells)} |")
    shmem = _SHMEM.read_text().strip() if _SHMEM.exists() else "not known"
    lines.append(f"\nHuge pages of shared memory, by the kernel: {shmem}")
    return "\n".join(lines)


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (args.ranks, store.port, args.runs, args.mib, args.json)
    multiprocessing.spawn(time_rank, arguments, nprocs=args.ranks)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    main()
