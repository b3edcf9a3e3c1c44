"""What a checkpoint costs: how long training stands still, how long until it is there, and how long it takes to load.

    .venv/bin/python scripts/bench/checkpoint.py                              # 1 GiB of state on 2 ranks
    .venv/bin/python scripts/bench/checkpoint.py --mib 256 --rounds 3 --json
    .venv/bin/python scripts/bench/checkpoint.py --peer-python /path/to/python   # DeepSpeed's default writer too
    .venv/bin/python scripts/bench/checkpoint.py --before /path/to/checkout      # saves and loads of another commit too

Everything is measured in one run, in turns within each round, on the same state and the same disk, so that a busy
machine is busy for all: the floors (`checkpoint_floors.py`), dsrun beside training, with its copy behind training, and
in it, torch's distributed checkpoint in both ways, and DeepSpeed's default: `torch.save` of a rank's shard, then fsync,
which it leaves out, and `torch.load` of it. Before each load the system forgets the files' pages. Loads on 1 and 4
ranks are done by the ranks there are: the first one does all of it, or each of two does what two ranks would do.
Memory that is loaded to has been written before, as a model's has, on small pages. A total ends when the checkpoint is
durable and every rank knows; freeing the blocks of the one it replaces goes on behind it, and is timed by itself.
Prints median and spread over the rounds, and medians of each round's own ratios.
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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_floors import (
    copying,
    copying_by_idle_cores,
    drop_cache,
    on_huge_pages,
    reading,
    reading_through_cache,
    writing,
)

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
        from dsrun.checkpoint_files.index.region import uncut
        from dsrun.runtime.protocols import SOLE_HOLDER, StateEntry

        shard = self.numel // self.size
        return [
            StateEntry(name.split(".")[0], name.split(".")[1], uncut((self.numel,)), self.rank * shard,
                       (self.rank + 1) * shard, tensor, SOLE_HOLDER)
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
    """The copy, and writing to the disk."""
    flats, path = list(state.flat.values()), folder / f"floor-{state.rank}"
    rounds.add("floor: copy", timed(copying(flats, staging)))
    rounds.add("floor: copy by idle cores", timed(copying_by_idle_cores(flats, staging)))
    seconds = {}
    for how, direct in (("direct", True), ("page cache, early write-back", False)):
        seconds[how] = timed(writing(path, staging, state.nbytes(), direct=direct))
        path.unlink()
        rounds.add(f"floor: disk write, {how}", seconds[how])
    rounds.add("floor: disk write, the better", min(seconds.values()))


def measure_read_floors(state: State, target: Path, rounds: Rounds, staging: torch.Tensor) -> None:
    """Reading the checkpoint's own files, a rank one file."""
    path = sorted(target.glob("rank-*"))[state.rank]
    kinds = {
        "direct": reading(path, staging),
        "page cache": reading_through_cache(path, staging),
        "direct, fresh memory": reading(path, None),
    }
    seconds = {}
    for how, read in kinds.items():
        drop_cache(target)
        seconds[how] = timed(read)
        rounds.add(f"floor: disk read, {how}", seconds[how])
    rounds.add("floor: disk read, the better", min(seconds["direct"], seconds["page cache"]))


def measure_dsrun(state: State, folder: Path, rounds: Rounds, savers: dict[str, Any], staging: torch.Tensor) -> None:
    """Beside training, and in it; then loading."""
    from dsrun.checkpoint_files.index.region import uncut
    from dsrun.checkpoint_files.parse import read_index
    from dsrun.runtime.checkpoint.format.load import read
    from dsrun.runtime.checkpoint.save.request import SaveRequest
    from dsrun.runtime.protocols import SOLE_HOLDER, StateEntry

    def want() -> SaveRequest:
        entries = state.entries()
        return SaveRequest(entries=entries, values={}, rank_values={}, aliases={}, save_latest=True,
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
        if hasattr(saver, "wait_until_freed"):  # not in a commit before
            rounds.add(f"dsrun {name}: freeing", timed(saver.wait_until_freed))
    target = folder / "dsrun" / "beside"
    measure_read_floors(state, target, rounds, staging)
    for size in (1, 2, 4):
        drop_cache(target)
        index, shard = read_index(target), state.numel // size

        wanted: list[StateEntry] = []
        for rank in range(state.rank, size, state.size):
            for role in state.flat:
                flat = in_pages(PARAMETERS * shard)
                for number, tensor in enumerate(flat.split(shard)):
                    span = rank * shard, (rank + 1) * shard
                    wanted.append(StateEntry(f"p{number}", role, uncut((state.numel,)), *span, tensor, SOLE_HOLDER))

        def load(index: Any = index, wanted: Any = wanted, size: int = size) -> None:
            read(index, target, wanted, others=size > 1, **(share_blocks(index) if size > 1 else {}))

        rounds.add(f"dsrun: load on {size}", timed(load))


def share_blocks(index: Any) -> dict[str, Any]:
    """What `read` is given where ranks of a host want the same blocks; nothing in a commit before."""
    try:
        from dsrun.checkpoint_files.blocks.shared import SharedBlocks, shared_bytes
    except ImportError:
        return {}
    from dsrun.runtime.mesh.host_memory.collectives import exchange_over
    from dsrun.runtime.mesh.host_memory.segments import share_memory

    world = dist.group.WORLD
    assert world is not None
    segments = share_memory(shared_bytes(index), exchange_over(world))
    return {"sharing": SharedBlocks(segments, dist.get_rank(), index)}


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
    staging = on_huge_pages(state.nbytes() + (1 << 20))
    if args.only == "dsrun":
        from dsrun.runtime.checkpoint.staging import writer_process

        # The writer's modules are the other checkout's too, whatever this environment has installed.
        before, after = "sys.path += sys.argv[2:]", "sys.path[:0] = sys.argv[2:]"
        writer_process._PROGRAM = writer_process._PROGRAM.replace(before, after)
    savers: dict[str, Any] = {}
    if args.only != "pickle":
        from dsrun.runtime.checkpoint.format.policy import SavePolicy
        from dsrun.runtime.checkpoint.save.saver import Saver
        from dsrun.runtime.mesh.c10d import GlooCollectives
        from dsrun.runtime.mesh.host_memory.noticeboard import noticeboard
        from dsrun.runtime.mesh.step_position import Where

        world = dist.group.WORLD
        assert world is not None
        collectives = GlooCollectives(world, None, reductions=world, where=Where())
        from dsrun.runtime.checkpoint.save.fence import Fence

        for name, asynchronous, later in (
            ("beside", True, False),
            ("behind", True, True),
            ("in training", False, False),
        ):
            policy = SavePolicy(asynchronous=asynchronous, later=later)
            savers[name] = Saver(collectives, noticeboard(), device=torch.device("cpu"), policy=policy, fence=Fence())
    for number in range(args.rounds + 1):
        wait_for_turn(folder.parent, number * args.turns + args.turn)
        here = Rounds() if number == 0 else rounds  # the first one writes pages for the first time
        if args.only is None:
            measure_floors(state, folder, here, staging)
        if args.only != "pickle":
            measure_dsrun(state, folder, here, savers, staging)
        if args.only is None:
            measure_torch(state, folder, here)
        if args.only != "dsrun":
            measure_pickle(state, folder, here)
        dist.barrier()
        if rank == 0:
            turn_file(folder.parent).write_text(str(number * args.turns + args.turn + 1))
    for saver in savers.values():
        saver.close(lambda: None)
    if rank == 0:
        Path(args.folder, "figures.json").write_text(
            json.dumps({"bytes": state.nbytes() * size, "torch": torch.__version__, "seconds": rounds.seconds})
        )
    dist.barrier()
    dist.destroy_process_group()


def turn_file(folder: Path) -> Path:
    """Says whose turn it is, among groups of ranks that measure in turns."""
    return folder / "turn"


def wait_for_turn(folder: Path, number: int) -> None:
    """Returns when it is a group's turn."""
    while int(turn_file(folder).read_text() or -1) < number:
        time.sleep(0.01)
    dist.barrier()


@dataclass(frozen=True)
class Group:
    """Ranks that measure: an interpreter, what `only`, and a checkout that is not this one."""

    python: str
    only: str | None = None
    tree: str | None = None


def start(groups: list[Group], args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Runs groups of ranks that take turns round by round, and returns the figures of each."""
    turn_file(Path(folder)).write_text("0")
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    for number, group in enumerate(groups):
        inner = Path(folder, f"group-{number}")
        inner.mkdir()
        words = ["--rank-of", str(inner), "--mib", str(args.mib), "--rounds", str(args.rounds)]
        words += ["--turn", str(number), "--turns", str(len(groups)), *(["--only", group.only] if group.only else [])]
        command = [group.python, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), "--master-port",
                   "0", "--standalone", __file__, *words]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if group.tree is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(Path(group.tree, "src")), group.tree])
        running.append((inner, subprocess.Popen(command, env=environment, stdout=sys.stderr)))
    try:
        while any(process.poll() is None for _, process in running):
            if any(process.poll() for _, process in running):
                raise SystemExit("error: a group of ranks has failed; what it says stands above")
            time.sleep(0.1)
    finally:
        for _, process in running:
            process.terminate()
            process.wait()
    return [json.loads((inner / "figures.json").read_text()) for inner, _ in running]


def tell(figures: dict[str, Any]) -> None:
    """Prints a table and the bars."""
    seconds: dict[str, list[float]] = figures["seconds"]
    print(f"{figures['bytes'] / 2**30:.2f} GiB over all ranks, torch {figures['torch']}")
    print(f"{'':48}{'median s':>10}{'least s':>10}{'most s':>10}{'GB/s':>8}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:48}{median:10.3f}{min(values):10.3f}{max(values):10.3f}{figures['bytes'] / median / 1e9:8.2f}")
    bars = [("dsrun beside: stall", "floor: copy", 1.3), ("dsrun behind: stall", "floor: copy", 1.3)]
    bars += [("dsrun beside: stall", "torch DCP async_save: stall", 0.4)]
    for prefix in ("before's ", ""):
        for how in ("the better", "direct"):
            bars += [(f"{prefix}dsrun beside: total", f"floor: disk write, {how}", 1.2)]
            bars += [(f"{prefix}dsrun: load on {n}", f"floor: disk read, {how}", 1.3) for n in (1, 2, 4)]
    for name, floor, bar in bars:
        if name in seconds:
            each = [mine / least for mine, least in zip(seconds[name], seconds[floor], strict=True)]
            ratio = statistics.median(each)
            spread = f"{min(each):.2f} to {max(each):.2f}"
            print(f"{name} / {floor:44}{ratio:6.2f}, {spread}  (bar {bar}{'' if ratio <= bar else ', MISSED'})")


def main() -> None:
    """Reads the words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="state of all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk that is meant (default: the temporary folder)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer-python", default=os.environ.get("DSRUN_PEER_PYTHON"), help="also $DSRUN_PEER_PYTHON")
    parser.add_argument("--before", default=None, metavar="CHECKOUT", help="another commit of dsrun, measured too")
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", dest="rank_of", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        args.folder = args.rank_of
        run_rank(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        groups, names = [Group(sys.executable)], [""]
        if args.before:
            groups.append(Group(sys.executable, "dsrun", args.before))
            names.append("before's ")
        if args.peer_python:
            groups.append(Group(args.peer_python, "pickle"))
            names.append("peer's ")
        found = start(groups, args, folder)
        figures = found[0]
        for name, other in zip(names[1:], found[1:], strict=True):
            figures["seconds"].update({f"{name}{key}": values for key, values in other["seconds"].items()})
    print(json.dumps(figures)) if args.json else tell(figures)


if __name__ == "__main__":
    main()
