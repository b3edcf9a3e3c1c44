"""What a checkpoint costs: how long training stands still, how long until it is there, and how long it takes to load.

    .venv/bin/python scripts/bench/checkpoint.py                              # 1 GiB of state on 2 ranks
    .venv/bin/python scripts/bench/checkpoint.py --mib 256 --rounds 3 --json
    .venv/bin/python scripts/bench/checkpoint.py --peer-python /path/to/python   # DeepSpeed's default writer too

Everything is measured in one run, one after the other in each round, on the same state and the same folder, so that a
busy machine is busy for all: the floors (a copy into memory that has been written before; the disk's write and read
bandwidth through one file of the same size a rank, at once), dsrun beside training, with its copy behind training, and
in it, torch's distributed checkpoint in both ways, and DeepSpeed's default: `torch.save` of a rank's shard, then fsync,
which it leaves out, and `torch.load` of it. Before each load the system forgets the files' pages. Loads on 1 and 4
ranks are done by the ranks there are: the first one does all of it, or each of two does what two ranks would do.
Prints median and smallest of each over the rounds. Run it on a quiet machine; on a busy one look at the ratios.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PARAMETERS = 48


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    work()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def in_pages(numel: int) -> torch.Tensor:
    """Returns fp32 memory that begins at a page, as arenas do, and has been written before."""
    return torch.frombuffer(mmap.mmap(-1, numel * 4), dtype=torch.float32).fill_(0)


def drop_cache(folder: Path) -> None:
    """Has the system forget the pages of a folder's files, so that reading reads."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class State:
    """A rank's shard: slices of parameters with two states each, as flat buffers cut into views."""

    def __init__(self, mib: int, rank: int, size: int) -> None:
        numel = mib * (1 << 20) // 4 // PARAMETERS // 3 // size * size
        self.rank, self.size, self.numel = rank, size, numel
        self.flat = {role: in_pages(PARAMETERS * numel // size) for role in ("param", "exp_avg", "exp_avg_sq")}
        for flat in self.flat.values():
            flat.uniform_()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the shard by name."""
        shard = self.numel // self.size
        return {
            f"p{number}.{role}": flat[number * shard : (number + 1) * shard]
            for role, flat in self.flat.items()
            for number in range(PARAMETERS)
        }

    def entries(self) -> list[Any]:
        """The same for dsrun."""
        from dsrun.runtime.protocols import StateEntry

        shard = self.numel // self.size
        return [
            StateEntry(name.split(".")[0], name.split(".")[1], (self.numel,), self.rank * shard,
                       (self.rank + 1) * shard, tensor, False)
            for name, tensor in self.tensors().items()
        ]  # fmt: skip

    def nbytes(self) -> int:
        """Of this rank."""
        return sum(flat.numel() * 4 for flat in self.flat.values())


class Rounds:
    """Seconds of every kind, round by round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """Notes one."""
        self.seconds.setdefault(name, []).append(seconds)


def measure_floors(state: State, folder: Path, rounds: Rounds, staging: torch.Tensor) -> None:
    """The copy, and the disk."""

    def copy() -> None:
        offset = 0
        for flat in state.flat.values():
            data = flat.view(torch.uint8)
            staging[offset : offset + data.numel()].copy_(data)
            offset += data.numel()

    rounds.add("floor: copy", timed(copy))

    def copy_by_threads() -> None:
        from dsrun.runtime.checkpoint.host_copy import copy_bytes, own_idle_threads

        copies, offset = [], 0
        for flat in state.flat.values():
            copies.append((staging[offset:], flat))
            offset += flat.nbytes
        copy_bytes(copies, threads=own_idle_threads())

    rounds.add("floor: copy by idle cores", timed(copy_by_threads))
    path = folder / f"floor-{state.rank}"

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        image, step = memoryview(staging.numpy()), 16 << 20
        for first in range(0, state.nbytes() // 4096 * 4096, step):
            os.pwrite(descriptor, image[first : min(first + step, state.nbytes() // 4096 * 4096)], first)
        os.fsync(descriptor)
        os.close(descriptor)

    rounds.add("floor: disk write", timed(write))

    def read() -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        image, step, first = memoryview(staging.numpy()), 16 << 20, 0
        while count := os.preadv(descriptor, [image[first : first + step]], first):
            first += count
        os.close(descriptor)

    rounds.add("floor: disk read", timed(read))
    path.unlink()


def measure_dsrun(state: State, folder: Path, rounds: Rounds, savers: dict[str, Any]) -> None:
    """Beside training, and in it; then loading."""
    from dsrun.checkpoint_files.parse import read_index
    from dsrun.runtime.checkpoint.load import read
    from dsrun.runtime.checkpoint.under_way import Wanted
    from dsrun.runtime.protocols import StateEntry

    def want() -> Wanted:
        entries = state.entries()
        return Wanted(entries=entries, values={}, rank_values={}, aliases={}, save_latest=True,
                      when_saved=lambda nbytes, seconds: None, units=[int(e.name[1:]) for e in entries],
                      order=range(PARAMETERS))  # fmt: skip

    for name, saver in savers.items():

        def save(saver: Any = saver, name: str = name) -> None:
            saver.save(folder / "dsrun", name.split()[0], want, progress=lambda: None)

        began = time.perf_counter()
        rounds.add(f"dsrun {name}: stall", timed(save))
        if saver.policy.later:
            # What a step that came at once would wait for; behind forward and backward it is less, or nothing.
            rounds.add(f"dsrun {name}: a step at once waits", timed(saver.fence.wait_all))
        saver.finish(lambda: None)
        dist.barrier()
        rounds.add(f"dsrun {name}: total", time.perf_counter() - began)
    target = folder / "dsrun" / "beside"
    for size in (1, 2, 4):
        drop_cache(target)
        index, shard = read_index(target), state.numel // size

        wanted: list[StateEntry] = []
        for rank in range(state.rank, size, state.size):
            for role in state.flat:
                flat = in_pages(PARAMETERS * shard)
                for number, tensor in enumerate(flat.split(shard)):
                    span = rank * shard, (rank + 1) * shard
                    wanted.append(StateEntry(f"p{number}", role, (state.numel,), *span, tensor, False))

        def load(index: Any = index, wanted: Any = wanted, size: int = size) -> None:
            read(index, target, wanted, others=size > 1)

        rounds.add(f"dsrun: load on {size}", timed(load))


def measure_torch(state: State, folder: Path, rounds: Rounds) -> None:
    """torch's distributed checkpoint, each rank its own tensors."""
    import torch.distributed.checkpoint as dcp

    tensors: Any = {f"rank{state.rank}.{name}": tensor for name, tensor in state.tensors().items()}
    shutil.rmtree(folder / "dcp", ignore_errors=True) if state.rank == 0 else None
    rounds.add("torch DCP save: stall", timed(lambda: dcp.save(tensors, checkpoint_id=folder / "dcp")))
    pending: list[Any] = []
    began = time.perf_counter()
    stall = timed(lambda: pending.append(dcp.async_save(tensors, checkpoint_id=folder / "dcp-async")))
    rounds.add("torch DCP async_save: stall", stall)
    pending[0].result()
    dist.barrier()
    rounds.add("torch DCP async_save: total", time.perf_counter() - began)
    drop_cache(folder / "dcp")
    rounds.add("torch DCP: load on 2", timed(lambda: dcp.load(tensors, checkpoint_id=folder / "dcp")))


def measure_pickle(state: State, folder: Path, rounds: Rounds) -> None:
    """What DeepSpeed's default writer does: `torch.save` of a dict; and the fsync that makes it last."""
    path = folder / f"pickled-{state.rank}.pt"

    def save() -> None:
        torch.save(state.tensors(), path)

    def sync() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    stall = timed(save)
    rounds.add("torch.save, as DeepSpeed: stall", stall)
    rounds.add("torch.save, as DeepSpeed: total with fsync", stall + timed(sync))
    drop_cache(folder)

    def load() -> None:
        for name, tensor in torch.load(path, map_location="cpu", weights_only=True).items():
            tensors[name].copy_(tensor)

    tensors = state.tensors()
    rounds.add("torch.load, as DeepSpeed: load on 2", timed(load))
    path.unlink()


def run_rank(args: argparse.Namespace) -> None:
    """One rank of the measurement."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(args.folder)
    state, rounds = State(args.mib, rank, size), Rounds()
    staging = torch.frombuffer(mmap.mmap(-1, -(-state.nbytes() // 4096) * 4096), dtype=torch.uint8).fill_(1)
    savers: dict[str, Any] = {}
    if args.only is None:
        from dsrun.runtime.checkpoint.policy import SavePolicy
        from dsrun.runtime.checkpoint.saver import Saver
        from dsrun.runtime.mesh.c10d import GlooCollectives
        from dsrun.runtime.mesh.noticeboard import noticeboard
        from dsrun.runtime.mesh.where import Where

        world = dist.group.WORLD
        assert world is not None
        collectives = GlooCollectives(world, None, reductions=world, where=Where())
        from dsrun.runtime.checkpoint.fence import Fence

        for name, asynchronous, later in (
            ("beside", True, False),
            ("behind", True, True),
            ("in training", False, False),
        ):
            policy = SavePolicy(asynchronous=asynchronous, later=later)
            savers[name] = Saver(collectives, noticeboard(), device=torch.device("cpu"), policy=policy, fence=Fence())
    for number in range(args.rounds + 1):
        here = Rounds() if number == 0 else rounds  # the first one writes pages for the first time
        if args.only is None:
            measure_floors(state, folder, here, staging)
            measure_dsrun(state, folder, here, savers)
            measure_torch(state, folder, here)
        measure_pickle(state, folder, here)
    for saver in savers.values():
        saver.close(lambda: None)
    if rank == 0:
        Path(args.folder, "figures.json").write_text(
            json.dumps({"bytes": state.nbytes() * size, "torch": torch.__version__, "seconds": rounds.seconds})
        )
    dist.barrier()
    dist.destroy_process_group()


def start(python: str, args: argparse.Namespace, folder: str, only: str | None) -> dict[str, Any]:
    """Runs the ranks with an interpreter and returns their figures."""
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        words = ["--rank-of", inner, "--mib", str(args.mib), "--rounds", str(args.rounds)]
        words += ["--only", only] if only else []
        command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), "--master-port", "0",
                   "--standalone", __file__, *words]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
        return json.loads(Path(inner, "figures.json").read_text())


def tell(figures: dict[str, Any]) -> None:
    """Prints a table and the bars."""
    least = {name: min(values) for name, values in figures["seconds"].items()}
    print(f"{figures['bytes'] / 2**30:.2f} GiB over all ranks, torch {figures['torch']}")
    print(f"{'':44}{'median s':>10}{'least s':>10}{'GB/s':>8}")
    for name, values in figures["seconds"].items():
        rate = figures["bytes"] / min(values) / 1e9
        print(f"{name:44}{statistics.median(values):10.3f}{min(values):10.3f}{rate:8.2f}")
    bars = [
        ("stall / copy", least["dsrun beside: stall"] / least["floor: copy"], 1.3),
        ("stall behind / copy", least["dsrun behind: stall"] / least["floor: copy"], 1.3),
        ("stall / DCP async_save", least["dsrun beside: stall"] / least["torch DCP async_save: stall"], 0.4),
        ("total / disk write", least["dsrun beside: total"] / least["floor: disk write"], 1.2),
        *(
            (f"load on {n} / disk read", least[f"dsrun: load on {n}"] / least["floor: disk read"], 1.3)
            for n in (1, 2, 4)
        ),
    ]
    for name, ratio, bar in bars:
        print(f"{name:44}{ratio:10.2f}  (bar {bar}{'' if ratio <= bar else ', MISSED'})")


def main() -> None:
    """Reads the words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="state of all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk that is meant (default: the temporary folder)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer-python", default=os.environ.get("DSRUN_PEER_PYTHON"), help="also $DSRUN_PEER_PYTHON")
    parser.add_argument("--rank-of", dest="rank_of", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        args.folder = args.rank_of
        run_rank(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = start(sys.executable, args, folder, None)
        if args.peer_python:
            peer = start(args.peer_python, args, folder, "pickle")["seconds"]
            figures["seconds"].update({f"peer's {name}": values for name, values in peer.items()})
    print(json.dumps(figures)) if args.json else tell(figures)


if __name__ == "__main__":
    main()
