"""What offload costs, beside the bytes it has to move and beside others.

    python scripts/bench/offload.py [--only step ...] [--peer-python PYTHON] [--runs 9] [--quick] [--json FILE]

Parts, each a module of offload_parts that says what it measures:
    step      the optimizer's step on the host: bf16 gradient to bf16 parameter
    nvme      a drive read and written, and a step whose states are on it
    cpu       the step beside the next forward, over a bus held to a pace
    exposed   how much of the step a run waits for, stepped behind the norm and ahead of it, at every stage
    params    parameters streamed from host memory while blocks compute, over a bus held to a pace

Contenders take turns within a round, so that ratios are of neighbours in time. DeepSpeed belongs into an environment of
its own, and is left out without one; its first start compiles for a minute:
    python -m venv /tmp/ds && DS_BUILD_OPS=0 /tmp/ds/bin/pip install torch deepspeed==0.19.8 ninja
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from offload_parts import cpu, exposed, nvme, params, step
from offload_parts.options import Options
from sections import measure
from zero_peers.figures import Figures

PARTS: dict[str, Callable[[Options], list[Figures]]] = {
    "step": step.measure,
    "nvme": nvme.measure,
    "cpu": cpu.measure,
    "exposed": exposed.measure,
    "params": params.measure,
}


def main() -> None:
    """Measures the parts that are asked for, and prints each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", default=os.environ.get("DSRUN_PEER_PYTHON"), help="has DeepSpeed; also $DSRUN_PEER_PYTHON"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--quick", action="store_true", help="2 rounds of small sizes, without DeepSpeed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    peer = None if args.quick else args.peer_python
    options = Options(peer, 2 if args.quick else args.runs, args.threads, args.quick)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"python {platform.python_version()}, torch {torch.__version__}, {machine}\n")
    measure(PARTS, args.only, options, runs=options.runs, json_file=args.json)


if __name__ == "__main__":
    main()
