"""The largest model of which a contender completes steps: `python -m gpu.largest dsrun-ram cuda 7B --minutes 4`.

Blocks are added by a quarter until two steps in a process of their own fail or take too long; if the first number
fails, it is halved until one goes. One JSON line on stdout, also behind each that went: parameters of the largest, and
why the next did not go.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .shapes import OFFLOADED

_GROWTH = 1.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender")
    parser.add_argument("device")
    parser.add_argument("size", choices=OFFLOADED)
    parser.add_argument("--from-layers", type=int, help="begin with so many blocks; default: the shape's own")
    parser.add_argument("--most-layers", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=3.0)
    args = parser.parse_args()
    ends_s = time.monotonic() + 60 * args.minutes
    shape = OFFLOADED[args.size]

    def attempt(layers: int) -> str | None:
        patience_s = ends_s - time.monotonic()
        if patience_s <= 0:
            return "no time was left"
        return _attempt(args.contender, args.device, args.size, layers, patience_s=patience_s)

    for found in search(attempt, first=args.from_layers or shape.layers, most=args.most_layers):
        parameters = None if found.layers is None else shape.with_layers(found.layers).numel()
        then = {"layers": found.next, "why": found.reason}
        result = {"contender": args.contender, "layers": found.layers, "parameters": parameters, "then": then}
        print(json.dumps(result), flush=True)


@dataclass(frozen=True, slots=True)
class Found:
    """The largest number of blocks so far.

    Attributes:
        layers: largest number of blocks that worked; None before any did.
        next: the number that is tried behind it, or was and did not go.
        reason: reason that `next` blocks did not work, or a note that they were not tried.
    """

    layers: int | None
    next: int
    reason: str


def search(attempt: Callable[[int], str | None], *, first: int, most: int) -> Iterator[Found]:
    """Looks for the largest number of blocks that goes, and yields what is known behind each attempt.

    Args:
        attempt: tries a number of blocks, and returns why it did not go, None if it did.
        first: number to begin with.
        most: largest number of blocks to try.
    """
    best: int | None = None
    least_failed: int | None = None
    reason = ""
    layers = first
    while layers <= most and (least_failed is None or layers < least_failed):
        failure = attempt(layers)
        if failure is None:
            best, layers = layers, max(layers + 1, int(_GROWTH * layers))
            yield Found(best, least_failed or layers, reason or "it was not tried")
            continue
        least_failed, reason = layers, failure
        yield Found(best, least_failed, reason)
        if best is not None or layers == 1:
            return
        layers //= 2


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
