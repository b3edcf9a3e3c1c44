"""How long commands take to answer, and a job to its end after an all-reduce, in turn with torchrun and bare torch.

    python scripts/bench/startup.py [--runs 10]

Whole processes by the wall clock, interleaved round by round, after one round that is not counted. Prints a Markdown
table of medians with least and most, and the ratio to `import torch` of the same round.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print("sum", x.item(), flush=True)
dist.barrier()  # or a rank that leaves early breaks the connections of those behind it
dist.destroy_process_group()
"""


def commands(folder: Path, python: str, ranks: list[int]) -> dict[str, list[str]]:
    """Returns what is timed, by name."""
    script = folder / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    config = folder / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}')
    dsrun = [python, "-m", "dsrun"]
    timed = {
        "import torch": [python, "-c", "import torch"],
        "dsrun --help": [*dsrun, "--help"],
        "dsrun probe": [*dsrun, "probe"],
        "dsrun --dry-run": [*dsrun, "--dry-run", str(script)],
        "dsrun config check": [*dsrun, "config", "check", str(config)],
    }
    for n in ranks:
        for start in ("fork", "exec"):
            name = f"dsrun -n {n} --start {start}, an all-reduce"
            timed[name] = [*dsrun, "-n", str(n), "--start", start, "--log-dir", str(folder), str(script)]
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), str(script)]
        timed[f"torchrun, {n} ranks, an all-reduce"] = torchrun
    return timed


def main() -> None:
    """Times every command in turn and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        timed = commands(Path(name), sys.executable, args.ranks)
        seconds: dict[str, list[float]] = {key: [] for key in timed}
        for round_ in range(args.runs + 1):
            for key, command in timed.items():
                started = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, cwd=name, timeout=120)
                if round_:
                    seconds[key].append(time.perf_counter() - started)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {args.runs} runs\n")
    print("| command | median s | least to most | x `import torch` |\n|---|---|---|---|")
    for key, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds["import torch"], strict=True))
        print(f"| `{key}` | {statistics.median(values):.3f} | {min(values):.3f} to {max(values):.3f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
