"""The parts of the GPU check, what each takes, and their order: proofs first, then parity, then figures.

Estimates are of an H100 with 16 cores; the results of a run hold what each part really took.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import losses
from .driver import Comparison, Part, Row
from .proofs import candidates, folder_of
from .shapes import LLAMA_7B, OFFLOADED

_ROOT = Path(__file__).parents[2]
TESTS = _ROOT / "tests"
#: What the proofs are where there is no GPU: a cheap file of the real ones, so that this way is gone in CI too.
_WITHOUT_A_GPU = ("not cuda", (TESTS / "runtime/memory/test_bus.py",))

#: Parts of the proofs, in the order in which they run: wrong numbers, NCCL, processes. Each costs its imports; a test
#: that ends its process is followed by another one, so that more parts would shield nothing.
_PROOFS = ("runtime", "mesh", "elsewhere")
#: Seconds that a process with torch takes before its first test; seconds that finding the tests takes; and what a file
#: takes of which nothing is known.
_START_S, _LISTING_S, _FILE_S = 5.0, 10.0, 4.0
#: The first process imports torch from a cold disk.
_COLD_S = 120
#: Rounds of the Llama contenders: each is started anew in every round, so that none has the quieter half of the run.
_ROUNDS = 2
_CONTENDERS = ("plain", "dsrun-1", "dsrun-2", "dsrun-3", "fsdp2", "deepspeed-1", "deepspeed-3")
PARITY = ("stages", "tiers", "formats")

#: Contenders and tokens of a step, by the model's size.
_OFFLOADED: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "4B": (("compute", "dsrun-cpu", "deepspeed-cpu", "fsdp2-ram"), (4096, 16_384, 65_536)),
    "7B": (("compute", "dsrun-ram", "deepspeed-ram", "fsdp2-ram"), (16_384,)),
}
_LARGEST = ("dsrun-gpu", "dsrun-ram", "dsrun-disk", "deepspeed-gpu", "deepspeed-ram", "deepspeed-disk")
#: Bytes of host memory a parameter of who takes most: FSDP2, of masters and gradients in fp32 whose page-locked blocks
#: are rounded up to powers of two, and Adam's two states.
_HOST_BYTES = 20
#: Bytes a parameter of weights, gradients, master and states, and the share of the memory that `largest` begins with.
_STATE_BYTES, _BEGINNING = 16, 0.6
#: Blocks that `largest` begins with on a drive: its room is found by trying.
_DISK_LAYERS = 8


def main_parts(
    proofs: Sequence[Part | Comparison], *, device: str, size: str, facts: Mapping[str, Any]
) -> list[Part | Comparison]:
    """Returns all parts, what says most about correctness first and what takes longest last.

    Args:
        proofs: parts of the proofs, as `proof_parts` returns them; empty where none are wanted.
        device: cuda or cpu.
        size: 1.3B, or tiny to try the check itself.
        facts: facts about the machine, as `machine.ask` returns them.
    """
    python = (sys.executable, "-m")
    tiny = size == "tiny"
    found: list[Part | Comparison] = [Part("probe", (*python, "dsrun", "probe", "--json"), _COLD_S, 5)]
    found += proofs
    # A process each, so that one that dies takes few rows along.
    found += [_parity(group, device, *(("short",) if tiny else ())) for group in PARITY]
    found += [
        Part("buses", (*python, "dsrun", "probe", "--bench", "--json"), 60, 20),
        Part("overhead", (*python, "gpu.overhead", device, "3" if tiny else "40"), 60, 15),
    ]
    for round_ in range(1 if tiny else _ROUNDS):
        found += [_llama(contender, round_, device, size) for contender in _CONTENDERS]
        if round_ == 0:
            compared = partial(losses.compare, first="plain", beginning="llama ", tolerance=losses.SAME_START)
            found.append(Comparison("llama losses", compared))
    return [*found, *_offload_parts(device=device, tiny=tiny, facts=facts)]


def listing_part(device: str) -> Part:
    """Returns the part that finds the marked tests, which the parts of the proofs are made of."""
    marker, files = ("cuda", ()) if device == "cuda" else _WITHOUT_A_GPU
    words = ("--root", str(TESTS), "--marker", marker, "--list", *map(str, files))
    return Part("proofs found", (sys.executable, "-m", "gpu.proofs", *words), _COLD_S, _LISTING_S, needs="pytest")


def proof_parts(listed: Row, *, device: str) -> list[Part | Comparison]:
    """Returns the parts that have some tests to run; what most concerns numbers comes first.

    Args:
        listed: row of `listing_part`. Where that failed, files are taken by their text.
        device: cuda or cpu.

    Returns:
        the row itself, with numbers in place of the names, and the parts.
    """
    result = listed.get("result", {})
    folders: Mapping[str, Mapping[str, float]] = result.get("folders") or _by_text()
    row = {**listed, "result": {**result, "folders": {folder: len(tests) for folder, tests in folders.items()}}}
    parts: dict[str, dict[str, float]] = {name: {} for name in _PROOFS}
    for folder, tests in folders.items():
        parts[_part_of(folder)].update(tests)
    found = Comparison("proofs found", lambda _: row, estimate_s=_LISTING_S)
    return [found, *(_proofs(name, tests, device) for name, tests in parts.items() if tests)]


def _part_of(folder: str) -> str:
    if folder.startswith("runtime/mesh"):
        return "mesh"
    return "runtime" if folder.startswith("runtime") else "elsewhere"


def _by_text() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for path in candidates(TESTS):
        name = path.relative_to(_ROOT).as_posix()
        found.setdefault(folder_of(name), {})[name] = _FILE_S
    return found


def _proofs(name: str, tests: Mapping[str, float], device: str) -> Part:
    files = dict.fromkeys(id_.partition("::")[0] for id_ in tests)
    marker = "cuda" if device == "cuda" else _WITHOUT_A_GPU[0]
    estimate_s = _START_S + sum(tests.values())
    # Generous: a machine may be slow, and a test that hangs takes its own limit.
    limit_s = math.ceil(3 * estimate_s + 30)
    words = ("--root", str(TESTS), "--marker", marker, "--limit-s", str(limit_s))
    # It ends by itself, with all rows that it has: the driver's own limit is for when that fails.
    argv = (sys.executable, "-m", "gpu.proofs", *words, *(str(_ROOT / file) for file in files))
    return Part(f"proofs {name}", argv, limit_s + 15, estimate_s, needs="pytest")


def _parity(group: str, device: str, *words: str) -> Part:
    backend = ("--backend", "gloo") if device == "cpu" else ()
    script = str(Path(__file__).parent / "parity.py")
    argv = (sys.executable, "-m", "dsrun", *backend, "-n", "1", "--no-plan", script, device, group, *words)
    return Part(f"parity {group}", argv, 90, 25)


def _llama(contender: str, round_: int, device: str, size: str) -> Part:
    argv = (sys.executable, "-m", "gpu.llama", contender, device, size)
    is_ours = not contender.startswith(("fsdp2", "deepspeed"))
    again = f"llama {contender} round 0" if round_ else None
    return Part(f"llama {contender} round {round_}", argv, 60, 12, _needed_by(contender), is_ours, again=again)


def _offload_parts(*, device: str, tiny: bool, facts: Mapping[str, Any]) -> Iterator[Part | Comparison]:
    """Yields what measures offload: it has no room beside the rest in one run, and is asked for with --only."""
    module = (sys.executable, "-m")
    folder = tempfile.gettempdir()
    floors = (*module, "gpu.floors", device, "--folder", folder, "--mib", "16" if tiny else "2048")
    yield Part("floors", floors, 90, 30, is_extra=True)
    sizes = (("tiny", _OFFLOADED["4B"]),) if tiny else tuple(_OFFLOADED.items())
    for model, (contenders, tokens) in sizes:
        # One number of blocks for all contenders of a size.
        layers = OFFLOADED[model].layers_within(facts["memory_bytes"], bytes_per_parameter=_HOST_BYTES)
        words = ("--layers", str(layers), "--tokens", *map(str, (256, 512) if tiny else tokens))
        for contender in contenders:
            argv = (*module, "gpu.offload", contender, device, model, "--folder", folder, *words)
            name = f"offload {model} {contender}"
            is_ours = contender.startswith(("compute", "dsrun"))
            yield Part(name, argv, 240, 30 if tiny else 120, _needed_by(contender), is_ours, is_extra=True)
        if tiny:
            continue
        beginning = f"offload {model} "
        compared = partial(losses.compare, first=contenders[1], beginning=beginning, tolerance=losses.OTHER_START)
        yield Comparison(f"{beginning}losses", compared, is_extra=True)
    for contender in _LARGEST:
        words = ("--from-layers", str(_first_layers(contender, facts)))
        words = ("tiny", "--from-layers", "1", "--most-layers", "2") if tiny else ("7B", *words)
        argv = (*module, "gpu.largest", contender, device, *words)
        is_ours = contender.startswith("dsrun")
        yield Part(f"largest {contender}", argv, 240, 200, _needed_by(contender), is_ours, is_extra=True)


def _first_layers(contender: str, facts: Mapping[str, Any]) -> int:
    """Returns with how many blocks a search begins: so few that they fit, by what the machine has."""
    tier = contender.partition("-")[2]
    if tier == "disk":
        return _DISK_LAYERS
    nbytes = facts.get("gpu_bytes", 0) if tier == "gpu" else facts["memory_bytes"]
    return LLAMA_7B.layers_within(int(_BEGINNING * nbytes), bytes_per_parameter=_STATE_BYTES)


def _needed_by(contender: str) -> str | None:
    return "deepspeed" if contender.startswith("deepspeed") else None
