"""What the machine can do at best, for the floors of offload: `python -m gpu.floors cuda [--folder DIR] [--mib 2048]`.

Bytes a second of large page-locked copies both ways, of an adam-shaped stream over host memory (torch's fused kernel in
fp32: 16 bytes an element in, 12 out, every core), and of a file by `dd` past the page cache. The best of a few runs
each. One JSON line on stdout, a longer one behind each figure: what was measured stays if the drive refuses direct
reads and writes, as tmpfs and overlays do. Without CUDA the copies are of host memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from .llama import wait

_RUNS = 5
_ADAM_BYTES = 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="on the drive")
    parser.add_argument("--mib", type=int, default=2048, help="of each buffer and file")
    args = parser.parse_args()
    for figures in measured(torch.device(args.device), folder=args.folder, mib=args.mib):
        print(json.dumps(figures), flush=True)


def measured(device: torch.device, *, folder: Path, mib: int) -> Iterator[dict[str, float | str]]:
    """Measures the buses, the host's step and the drive, and yields all figures so far behind each.

    Args:
        device: device that the measured buses lead to.
        folder: folder on the drive to measure.
        mib: size of each buffer and file in MiB.

    Yields:
        bytes a second by name; `no_disk`, why the drive could not be measured, in place of its two.
    """
    nbytes = mib << 20
    host_N = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there_N = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    found: dict[str, float | str] = {}
    found["to_device"] = _best(lambda: there_N.copy_(host_N, non_blocking=True), nbytes, device)
    yield dict(found)
    found["to_host"] = _best(lambda: host_N.copy_(there_N, non_blocking=True), nbytes, device)
    yield dict(found)
    found["host_step"] = _host_step(nbytes // 4)
    yield dict(found)
    try:
        found |= _disk(folder, mib)
    except subprocess.CalledProcessError as error:
        found["no_disk"] = f"{folder}: {error.stderr.strip()}"
    except OSError as error:
        found["no_disk"] = str(error)
    yield found


def _best(run: Callable[[], object], nbytes: int, device: torch.device) -> float:
    least_s = float("inf")
    for _ in range(_RUNS):
        wait(device)
        started_s = time.perf_counter()
        run()
        wait(device)
        least_s = min(least_s, time.perf_counter() - started_s)
    return nbytes / least_s


def _host_step(numel: int) -> float:
    param = nn.Parameter(torch.zeros(numel))
    param.grad = torch.full_like(param, 1e-3)
    optimizer = torch.optim.AdamW([param], lr=1e-3, fused=True)
    return _best(optimizer.step, _ADAM_BYTES * numel, torch.device("cpu"))


def _disk(folder: Path, mib: int) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        count = max(1, mib // 8)
        words = {
            "disk_write": ("if=/dev/zero", f"of={file.name}", "oflag=direct", "conv=notrunc"),
            "disk_read": (f"if={file.name}", "of=/dev/null", "iflag=direct"),
        }
        return {name: max(_dd(count, *ways) for _ in range(2)) for name, ways in words.items()}


def _dd(count: int, *words: str) -> float:
    started_s = time.perf_counter()
    subprocess.run(["dd", "bs=8M", f"count={count}", "status=none", *words], check=True, capture_output=True, text=True)
    return (count << 23) / (time.perf_counter() - started_s)


if __name__ == "__main__":
    main()
