"""Gloo's own all-gather and reduce-scatter against the calls dsrun makes of them, on ranks of this host.

    python scripts/bench/gloo_collectives.py [--ranks 2] [--runs 15]

Interleaved in one process a rank; prints a Markdown table of medians with least and most. See decision 0006.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dsrun.runtime.compat import TCPStore, all_gather_single, reduce_scatter_single
from dsrun.runtime.mesh.collectives import GlooCollectives, own_slice


def time_rank(rank: int, size: int, port: int, runs: int) -> None:
    """Times every collective on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    ours = GlooCollectives(group)
    if rank == 0:
        print(f"{size} ranks, {runs} runs\n\n| buffer | collective | median ms | least to most |\n|---|---|---|---|")
    for mib in (1, 16):
        for dtype in (torch.float32, torch.bfloat16):
            buffer = torch.ones(mib * 2**20 // dtype.itemsize // size * size, dtype=dtype)
            shard = own_slice(buffer, rank=rank, size=size).clone()
            calls: dict[str, Callable[[], object]] = {
                "Gloo's all-gather": lambda b=buffer, s=shard: all_gather_single(b, s),
                "dsrun's: a broadcast a slice": lambda b=buffer, s=shard: ours.all_gather(b, s).wait(),
                "Gloo's reduce-scatter": lambda b=buffer, s=shard: reduce_scatter_single(s, b),
                "dsrun's: an all-reduce": lambda b=buffer: ours.reduce_scatter(b).wait(),
            }
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for round_ in range(runs + 1):
                for name, call in calls.items():
                    buffer.fill_(1)
                    dist.barrier()
                    started = time.perf_counter()
                    call()
                    if round_:
                        seconds[name].append((time.perf_counter() - started) * 1e3)
            for name, values in seconds.items():
                if rank == 0:
                    spread = f"{min(values):.2f} to {max(values):.2f}"
                    label = f"{mib} MiB {str(dtype).removeprefix('torch.')}"
                    print(f"| {label} | {name} | {statistics.median(values):.2f} | {spread} |")
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(time_rank, (args.ranks, store.port, args.runs), nprocs=args.ranks)


if __name__ == "__main__":
    main()
