"""Checks and measures dsrun on a GPU machine, and writes one JSON file: what scripts/gpu_check runs.

    bash scripts/gpu_check --out results.json                                    proofs, parity, figures: 8 minutes
    bash scripts/gpu_check --out results.json --only proofs                      the tests that need a GPU: 3 minutes
    bash scripts/gpu_check --out offload.json --only floors,offload --minutes 25
    bash scripts/gpu_check --out largest.json --only largest --minutes 25
    bash scripts/gpu_check --bundle DIR                                          wheels for a machine without network
    bash scripts/gpu_check --bundle DIR --out results.json                       the check on such a machine

A part that fails, or for which no time is left, is in the file with the reason; the exit code is 1 if a part failed.
What runs stands in `parts.py`, how in `driver.py`, what a part measures in its own module.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from . import bundle, offload_floor
from .driver import Comparison, Part, Row, chosen, estimate_s, run_all, run_part
from .machine import MachineError, ask
from .parts import listing_part, main_parts, proof_parts


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bash scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--only", default="", help="beginnings of parts' names, with commas")
    parser.add_argument("--minutes", type=float, default=8.0, help="what all parts may take together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the check itself")
    parser.add_argument("--size", choices=("1.3B", "tiny"), default="1.3B", help="tiny: to try the check itself")
    parser.add_argument("--list", action="store_true", help="say what would run and how long, and run no part")
    parser.add_argument("--bundle", type=Path, help="folder of wheels: used with --out or --list, filled without")
    parser.add_argument("--bundle-python", default="3.12", help="version of Python of the machine that uses the bundle")
    args = parser.parse_args()
    if args.bundle is not None and args.out is None and not args.list:
        sys.exit(bundle.download(args.bundle, python=args.bundle_python))
    if args.out is None and not args.list:
        parser.error("--out is missing: the JSON file to write")
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as site:
        if args.bundle is not None:
            bundle.use(args.bundle, Path(site))
        sys.exit(_check(args))


def _check(args: argparse.Namespace) -> int:
    try:
        facts = ask(args.device, Path(tempfile.gettempdir()))
    except MachineError as error:
        _say(f"error: this machine could not be asked what it has: {error}")
        return 1
    refusal = _refusal(facts["missing"])
    if args.device == "cuda" and refusal is None and "gpu" not in facts and not args.list:
        _say("error: there is no CUDA GPU here\nhint: --device cpu --size tiny tries the check itself")
        return 2
    only = tuple(filter(None, args.only.split(",")))
    started_s = time.monotonic()
    proofs: list[Part | Comparison] = []
    if refusal is None and (not only or any(one.startswith("proofs") for one in only)):
        proofs = proof_parts(run_part(listing_part(args.device), patience_s=60 * args.minutes), device=args.device)
    everything = main_parts(proofs, device=args.device, size=args.size, facts=facts)
    parts = chosen(everything, only)
    if refusal is not None and everything[0] not in parts:
        parts.insert(0, everything[0])
    if not parts:
        names = ", ".join(dict.fromkeys(part.name.split()[0] for part in everything))
        _say(f"error: --only {args.only}: no part's name begins so\nhint: they begin with {names}")
        return 2
    if args.list and refusal is not None:
        _say(f"note: without the proofs, which cannot be looked for: {refusal}")
    for part in parts if args.list else ():
        print(f"{estimate_s([part]):4.0f} s  {part.name}")
    _say(f"{len(parts)} parts, about {estimate_s(parts) / 60:.1f} minutes; they may take {args.minutes:g}")
    if args.list:
        return 0
    report: dict[str, Any] = {"date": date.today().isoformat(), "machine": facts, "parts": {}}
    minutes = args.minutes - (time.monotonic() - started_s) / 60
    went = run_all(parts, out=args.out, minutes=minutes, report=report, derived=_tables, refusal=refusal)
    return 0 if went else 1


def _refusal(missing: list[str]) -> str | None:
    if not missing:
        return None
    hint = "where there is a network, `bash scripts/gpu_check --bundle DIR`; here, the same with --out FILE"
    if any(one.startswith("torch") for one in missing):
        hint = f"$PYTHON names the interpreter that has torch with CUDA; for the rest, {hint}"
    return f"packages are missing: {', '.join(missing)}\nhint: {hint}"


def _tables(rows: Mapping[str, Row]) -> dict[str, Any]:
    return {"offload": offload_floor.rows(rows)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
