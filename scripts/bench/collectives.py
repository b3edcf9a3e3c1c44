"""What moves the data of CPU ranks on one host: memory they share, Gloo's own calls, and the calls dsrun makes of Gloo.

    python scripts/bench/collectives.py [--ranks 2] [--runs 15] [--mib 4 64]

Interleaved in one process a rank, one thread each; prints a Markdown table of medians with least and most, and ratios
to a copy of the buffer by every rank at once (the floor). See decisions 0006 and 0015.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dsrun.runtime.compat import TCPStore, all_gather_single, reduce_scatter_single
from dsrun.runtime.mesh.c10d import GlooCollectives
from dsrun.runtime.mesh.collectives import own_slice
from dsrun.runtime.mesh.shared_memory import SharedMemoryCollectives

#: The floor.
COPY = "a copy of the buffer"


def time_rank(rank: int, size: int, port: int, runs: int, sizes_mib: Sequence[int]) -> None:
    """Times every collective on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    ours = GlooCollectives(group)
    shared = SharedMemoryCollectives(group, timeout_s=60)
    cpu = torch.device("cpu")
    if rank == 0:
        print(f"{size} ranks, {runs} runs\n\n| buffer | collective | median ms | least to most | x copy |")
        print("|---|---|---|---|---|")
    for mib in sizes_mib:
        for dtype in (torch.float32, torch.bfloat16):
            buffer = torch.ones(mib * 2**20 // dtype.itemsize // size * size, dtype=dtype)
            shard = own_slice(buffer, rank=rank, size=size).clone()
            other = torch.empty_like(buffer)
            near = shared.zeros(buffer.numel(), dtype=dtype, device=cpu)
            near_shard = shared.zeros(shard.numel(), dtype=dtype, device=cpu)
            calls: dict[str, Callable[[], object]] = {
                COPY: lambda b=buffer, o=other: o.copy_(b),
                "all-gather, shards in shared memory": lambda b=buffer, s=near_shard: shared.all_gather(b, s).wait(),
                "all-gather, through the mailbox": lambda b=buffer, s=shard: shared.all_gather(b, s).wait(),
                "reduce-scatter, in shared memory": lambda b=near: shared.reduce_scatter(b).wait(),
                "reduce-scatter, through the mailbox": lambda b=buffer: shared.reduce_scatter(b).wait(),
                "Gloo's all-gather": lambda b=buffer, s=shard: all_gather_single(b, s),
                "Gloo, a broadcast a slice": lambda b=buffer, s=shard: ours.all_gather(b, s).wait(),
                "Gloo's reduce-scatter": lambda b=buffer, s=shard: reduce_scatter_single(s, b),
                "Gloo, an all-reduce": lambda b=buffer: ours.reduce_scatter(b).wait(),
            }
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for round_ in range(runs + 1):
                for name, call in calls.items():
                    buffer.fill_(1)
                    near.fill_(1)
                    shared.barrier()
                    started = time.perf_counter()
                    call()
                    if round_:
                        seconds[name].append((time.perf_counter() - started) * 1e3)
            for name, values in seconds.items():
                if rank == 0:
                    spread = f"{min(values):.2f} to {max(values):.2f}"
                    label = f"{mib} MiB {str(dtype).removeprefix('torch.')}"
                    median = statistics.median(values)
                    ratio = median / statistics.median(seconds[COPY])
                    print(f"| {label} | {name} | {median:.2f} | {spread} | {ratio:.2f} |")
    shared.barrier()
    shared.close()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 64])
    args = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(time_rank, (args.ranks, store.port, args.runs, args.mib), nprocs=args.ranks)


if __name__ == "__main__":
    main()
