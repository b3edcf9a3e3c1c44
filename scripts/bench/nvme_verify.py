"""What `aio.verify` costs a training step whose optimizer states, or states and parameters, lie on a drive.

    python scripts/bench/nvme_verify.py [--folder FOLDER] [--rounds 40] [--samples 1 256] [--json FILE]

One process, fp32, AdamW, two engines over equal models: one verifies what it reads, one does not. They take turns of
two steps, of which the second counts, for during the first the other's last writes are still under way. Which one is
first changes from round to round, so each ratio is of neighbours in time; what is told is the median of the ratios and
their quartiles. A step is forward, backward and update. Few samples make a step of moving bytes alone, which is the
worst case; with many it computes as training does. Wall time is what a run waits. Processor time, of all threads, is
what verification takes where other work wants the processor, and hardly depends on how busy the machine is with others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsrun

_WIDTH = 1024
_BLOCKS = 6


class Block(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Adds to its input."""
        return x_BD + self.down(torch.relu(self.up(x_BD)))


class Model(nn.Module):
    """Blocks in a list, so each of them is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(_BLOCKS)])

    def forward(self, x_BD: Tensor) -> Tensor:
        """One block after the other."""
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD


def engine_on(folder: str, *, params: bool, verify: bool) -> Any:
    """An engine whose states, and parameters where `params` says so, lie in a folder."""
    drive = {"device": "nvme", "nvme_path": folder}
    zero: dict[str, Any] = {"stage": 3 if params else 1, "offload_optimizer": drive}
    if params:
        zero["offload_param"] = {**drive, "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "aio": {"verify": verify},
        "steps_per_print": 0,
    }
    torch.manual_seed(1)
    return dsrun.initialize(model=Model(), config=config)[0]


def step_s(engine: Any, x_BD: Tensor) -> tuple[float, float]:
    """Seconds of one step: of the wall, of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    engine.backward(engine(x_BD).square().mean())
    engine.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(engines: dict[bool, Any], x_BD: Tensor, rounds: int) -> dict[str, Any]:
    """Steps in turns; medians, and quartiles of the ratios of neighbours."""
    for engine in engines.values():
        step_s(engine, x_BD)
        step_s(engine, x_BD)
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(rounds):
        for verifies in (False, True) if number % 2 else (True, False):
            step_s(engines[verifies], x_BD)
            taken[verifies].append(step_s(engines[verifies], x_BD))
    figures: dict[str, Any] = {}
    for place, name in enumerate(("wall", "processor")):
        off, on = ([seconds[place] for seconds in taken[verifies]] for verifies in (False, True))
        ratios = [b / a for a, b in zip(off, on, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        added = statistics.median(b - a for a, b in zip(off, on, strict=True))
        figures[name] = {
            "without_ms": round(1e3 * statistics.median(off), 1),
            "with_ms": round(1e3 * statistics.median(on), 1),
            "added_ms": round(1e3 * added, 1),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(low, 3), round(high, 3)],
        }
    return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the drive; default: the present one")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"python {platform.python_version()}, torch {torch.__version__}, {machine}")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as folder:
        for params in (False, True):
            engines = {verify: engine_on(folder, params=params, verify=verify) for verify in (False, True)}
            for samples in args.samples:
                figures = compare(engines, torch.randn(samples, _WIDTH), args.rounds)
                what = "states and parameters" if params else "states"
                results.append({"on_drive": what, "samples": samples, **figures})
                print(f"{what}, {samples} samples: {figures}", flush=True)
            for engine in engines.values():
                engine.destroy()
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
