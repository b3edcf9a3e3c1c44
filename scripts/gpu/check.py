"""Runs every part of the check on a GPU machine, each in a process with a time limit, and writes one JSON file.

    bash scripts/gpu_check --out docs/benchmarks/h200.json [--only parity,llama] [--minutes 8]
    bash scripts/gpu_check --out docs/benchmarks/h200-offload.json --only floors,offload
    bash scripts/gpu_check --out docs/benchmarks/h200-largest.json --only largest --minutes 20

A part that fails, or for which no time is left, is in the file with the reason; the exit code is 1 if a part failed.
What a part measures is in its own module.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

from . import offload_floor

#: Rounds of the Llama contenders: each is started anew in every round, so that none has the quieter half of the run.
_ROUNDS = 2
_CONTENDERS = ("plain", "dsrun-1", "dsrun-2", "dsrun-3", "fsdp2", "deepspeed-1", "deepspeed-3")


#: Contenders and tokens of a step, by the model's size.
_OFFLOADED: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "4B": (("compute", "dsrun-cpu", "deepspeed-cpu", "fsdp2-ram"), (4096, 16_384, 65_536)),
    "7B": (("compute", "dsrun-ram", "deepspeed-ram", "fsdp2-ram"), (16_384,)),
}
_LARGEST = ("dsrun-gpu", "dsrun-ram", "dsrun-disk", "deepspeed-gpu", "deepspeed-ram", "deepspeed-disk")


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the check.

    Attributes:
        name: of its row in the results.
        argv: its command line; its last line of stdout is its result as JSON.
        limit_s: when it is ended.
        needs: a package without which there is nothing to run.
        is_ours: its failure is the check's; a peer that does not run on a machine is a result.
    """

    name: str
    argv: tuple[str, ...]
    limit_s: float
    needs: str | None = None
    is_ours: bool = True


def parts(*, device: str, size: str) -> list[Part]:
    """Returns all parts, what says most about correctness first and what takes longest last."""
    python = sys.executable
    module = (python, "-m")
    dsrun = (*module, "dsrun")
    backend = ("--backend", "gloo") if device == "cpu" else ()
    here = Path(__file__).parent
    found = [
        Part("probe", (*dsrun, "probe", "--json"), 30),
        Part("parity", (*dsrun, *backend, "-n", "1", "--no-plan", str(here / "parity.py"), device), 120),
        Part("buses", (*dsrun, "probe", "--bench", "--json"), 60),
        Part("overhead", (*module, "gpu.overhead", device), 60),
    ]
    for round_ in range(_ROUNDS if size != "tiny" else 1):
        for contender in _CONTENDERS:
            needs = "deepspeed" if contender.startswith("deepspeed") else None
            argv = (*module, "gpu.llama", contender, device, size)
            found.append(Part(f"llama {contender} round {round_}", argv, 90, needs))
    return [*found, *_offload_parts(device=device, size=size)]


def _offload_parts(*, device: str, size: str) -> list[Part]:
    """Returns what measures offload: it has no room beside the rest in one run, and is asked for with --only."""
    module = (sys.executable, "-m")
    tiny = size == "tiny"
    folder = tempfile.gettempdir()
    found = [Part("floors", (*module, "gpu.floors", device, "--folder", folder, "--mib", "16" if tiny else "2048"), 90)]
    sizes = (("tiny", _OFFLOADED["4B"]),) if tiny else tuple(_OFFLOADED.items())
    for model, (contenders, tokens) in sizes:
        words = ("--folder", folder, "--tokens", *map(str, (1024, 2048) if tiny else tokens))
        for contender in contenders:
            needs = "deepspeed" if contender.startswith("deepspeed") else None
            argv = (*module, "gpu.offload", contender, device, model, *words)
            found.append(Part(f"offload {model} {contender}", argv, 150, needs, is_ours=contender.startswith("dsrun")))
    for contender in _LARGEST:
        needs = "deepspeed" if contender.startswith("deepspeed") else None
        words = ("tiny", "--from-layers", "1", "--most-layers", "2") if tiny else ("7B", "--from-layers", "24")
        argv = (*module, "gpu.largest", contender, device, *words)
        found.append(Part(f"largest {contender}", argv, 240, needs))
    return found


def run_part(part: Part, *, patience_s: float) -> dict[str, Any]:
    """Runs one part to its end or its time limit.

    Args:
        part: what to run.
        patience_s: what is left of the whole check's time.

    Returns:
        its row: `state` (ok, failed, not run), `seconds`, and `result` or `why`.
    """
    if part.needs is not None and find_spec(part.needs) is None:
        return {"state": "not run", "why": f"{part.needs} is not installed"}
    if patience_s < 10:
        return {"state": "not run", "why": "no time was left"}
    started = time.monotonic()
    # Files, not pipes: a part that is ended may leave children that hold a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as talk:
        process = subprocess.Popen(part.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=talk, start_new_session=True)
        try:
            process.wait(min(part.limit_s, patience_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return {"state": "failed", "why": f"not done after {part.limit_s:.0f} s", "said": _end_of(talk)}
        seconds = round(time.monotonic() - started, 1)
        out.seek(0)
        text = out.read().strip()
        if process.returncode:
            return {
                "state": "failed",
                "seconds": seconds,
                "why": f"exit code {process.returncode}",
                "said": _end_of(talk),
            }
        return {"state": "ok", "seconds": seconds, "result": _result_in(text)}


def _result_in(text: str) -> Any:
    """Returns what a part printed: one JSON document, or lines of which the last holds one, tagged or not."""
    if text.startswith("{\n"):
        return json.loads(text)
    last = next(line for line in reversed(text.splitlines()) if "{" in line)
    return json.loads(last[last.index("{") :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", default="", help="beginnings of parts' names, with commas")
    parser.add_argument("--minutes", type=float, default=8.0, help="what all parts may take together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the check itself")
    parser.add_argument("--size", choices=("1.3B", "tiny"), default="1.3B", help="tiny: to try the check itself")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: there is no CUDA GPU here\nhint: --device cpu --size tiny tries the check itself", file=sys.stderr
        )
        sys.exit(2)
    deadline_s = time.monotonic() + 60 * args.minutes
    wanted = tuple(filter(None, args.only.split(",")))
    failed = False
    report: dict[str, Any] = {"date": date.today().isoformat(), "machine": _machine(args.device), "parts": {}}
    for part in parts(device=args.device, size=args.size):
        if wanted and not part.name.startswith(wanted):
            continue
        row = run_part(part, patience_s=deadline_s - time.monotonic())
        report["parts"][part.name] = row
        report["offload"] = offload_floor.rows(report["parts"])
        failed = failed or (row["state"] == "failed" and part.is_ours)
        print(_line(part.name, row), file=sys.stderr, flush=True)
        # After each part: what was measured stays if the machine is taken away.
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if failed else 0)


def _line(name: str, row: dict[str, Any]) -> str:
    said = row.get("said", "").strip().splitlines()
    why = f": {row['why']}" if "why" in row else ""
    return f"{name}: {row['state']}{why}" + "".join(f"\n    {line}" for line in said[-12:])


def _end_of(file: Any) -> str:
    file.seek(0)
    return file.read()[-4000:]


def _machine(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "cpus": os.cpu_count()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


if __name__ == "__main__":
    main()
