"""What a small training costs from its start to its end, with torch's compiler imported by its ranks and without.

One `dsrun` a round and way, in turn: two ranks, three steps, a config and nothing that compiles. `early` names the
compiler in the script, so that it is imported as it was before decision 0061: once by the spawner with `--start fork`,
by each rank with `exec`. Shown are the medians, with the smallest and the largest, of the seconds of a core of all
processes, of the wall's, and of the largest rank's own memory (its resident pages, those that it shares among them).

    python scripts/bench/train_start.py [--rounds 5] [--start fork|exec] [--only late|early]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SCRIPT = """
{first}
import json, os, resource, sys
import torch, dsrun
{import_it}
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
engine, *_ = dsrun.initialize(model=model, config="ds.json")
for step in range(3):
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
own = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:")) / 1024
there = ("torch._dyn" + "amo") in sys.modules
open(f"rank{{os.environ['RANK']}}.json", "w").write(json.dumps([peak, own, there]))
"""
_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def measured(way: str, start: str) -> tuple[float, float, float, float]:
    """Returns seconds of cores, seconds of the wall, and MiB of the largest rank: resident, and its share of pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Named in a comment only: where nothing imports it, a name alone has the spawner do so.
        texts = ("# torch.compile", "import torch._dynamo") if way == "early" else ("", "")
        (folder / "train.py").write_text(_SCRIPT.format(first=texts[0], import_it=texts[1]))
        (folder / "ds.json").write_text(json.dumps(_CONFIG))
        words = [sys.executable, "-m", "dsrun", "-n", "2", "--start", start, "train.py", "--config", "ds.json"]
        before, began_s = os.times(), time.perf_counter()
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wall_s, after = time.perf_counter() - began_s, os.times()
        core_s = after.children_user + after.children_system - before.children_user - before.children_system
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(there is (way == "early") for _, _, there in ranks), f"{way}: {ranks}"
    return core_s, wall_s, max(rank[0] for rank in ranks), max(rank[1] for rank in ranks)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start", choices=["fork", "exec"], default="fork")
    parser.add_argument("--only", choices=["late", "early"])
    options = parser.parse_args()
    ways: list[str] = [options.only] if options.only else ["early", "late"]
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            found[way].append(measured(way, options.start))
    print(f"{'compiler':<9}  {'seconds of cores':>20}  {'seconds':>20}  {'resident MiB':>20}  {'share MiB':>20}")
    for way, rows in found.items():
        cells = [
            f"{statistics.median(column):.1f} ({min(column):.1f} to {max(column):.1f})"
            for column in zip(*rows, strict=True)
        ]
        print(f"{way:<9}  " + "  ".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
