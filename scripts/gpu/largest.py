"""The largest model of which a contender completes steps: `python -m gpu.largest dsrun-ram cuda 7B --minutes 4`.

Blocks are added by a quarter until two steps in a process of their own fail or take too long. One JSON line on stdout:
parameters of the largest that went, and why the next did not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time

from .offload import SHAPES, numel_of

_GROWTH = 1.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender")
    parser.add_argument("device")
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--from-layers", type=int, help="begin with so many blocks; default: the shape's own")
    parser.add_argument("--most-layers", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=3.0)
    args = parser.parse_args()
    ends_s = time.monotonic() + 60 * args.minutes
    layers = args.from_layers or SHAPES[args.size].layers
    best: int | None = None
    why = "more were not asked for"
    while layers <= args.most_layers:
        patience_s = ends_s - time.monotonic()
        failure = "no time was left"
        if patience_s > 0:
            failure = _attempt(args.contender, args.device, args.size, layers, patience_s=patience_s)
        if failure is not None:
            why = failure
            break
        best, layers = layers, max(layers + 1, int(_GROWTH * layers))
    shape = SHAPES[args.size]
    result = {
        "contender": args.contender,
        "layers": best,
        "parameters": None if best is None else numel_of(dataclasses.replace(shape, layers=best)),
        "then": {"layers": layers, "why": why},
    }
    print(json.dumps(result))


def _attempt(contender: str, device: str, size: str, layers: int, *, patience_s: float) -> str | None:
    """Takes steps of a model in a process of its own; returns why it failed, None if it did not."""
    command = [sys.executable, "-m", "gpu.offload", contender, device, size, "--tokens", "2048"]
    with tempfile.TemporaryFile("w+") as talk:
        process = subprocess.Popen(
            [*command, "--layers", str(layers)], stdout=subprocess.DEVNULL, stderr=talk, start_new_session=True
        )
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return f"not done after {patience_s:.0f} s"
        if process.returncode == 0:
            return None
        talk.seek(0)
        said = talk.read().strip().splitlines()
        return f"exit code {process.returncode}: {said[-1][:300] if said else 'without a word'}"


if __name__ == "__main__":
    main()
