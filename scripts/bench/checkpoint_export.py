"""How long `dsrun checkpoint export` takes, and how much memory, beside a plain copy of the same bytes.

    python scripts/bench/checkpoint_export.py --gib 2 --dtype bf16

Writes a checkpoint of so many GiB of fp32 to a temporary folder (in --folder), exports it in a process of its own, and
prints one line of JSON: seconds, seconds of the processor, and that process's peak memory. Pages come from the page
cache where they fit there, so the disk is measured in writing only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dsrun.checkpoint_files.blocks.write_file import write_pieces
from dsrun.checkpoint_files.folder.publish import BOXES_KEY, Publication, file_name, publish
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.tensors.header import header_bytes

TENSOR_BYTES = 64 << 20


def make_checkpoint(folder: Path, nbytes: int) -> None:
    """Writes a checkpoint of fp32 tensors of 64 MiB each, with random bytes that are finite numbers."""
    count = nbytes // TENSOR_BYTES
    shape = (TENSOR_BYTES // 4 // 1024, 1024)
    named = {f"layers.{number}.weight:param@0@0": ("F32", shape) for number in range(count)}
    boxes = [
        {"key": key, "name": key.split(":")[0], "role": "param", "shape": shape, "offset": [0, 0]} for key in named
    ]
    header, _ = header_bytes(named, {BOXES_KEY: json.dumps(boxes)}, aligned=4096)
    block = bytearray(os.urandom(TENSOR_BYTES))
    block[3::4] = bytes(TENSOR_BYTES // 4)  # small exponents
    target = folder / "global_step1"
    target.mkdir(parents=True)
    pieces = [memoryview(header), *([memoryview(block)] * count)]
    written = write_pieces(target / file_name(0, "00000000"), pieces, calls=FileCalls(), progress=lambda: None)
    publication = Publication(
        folder=folder,
        tag=target.name,
        identity="00000000",
        files=[written.stored],
        values={"counters": {"global_steps": 1}},
        ranks=[{}],
        aliases={},
        save_latest=True,
        keep_last=None,
        keep_every=None,
    )
    publish(publication, calls=FileCalls())
    written.release(remove=False)


def main() -> None:
    """Measures, and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--dtype", choices=["bf16", "fp32", "stored"], default="bf16")
    parser.add_argument("--folder", type=Path, default=None)
    words = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=words.folder))
    try:
        make_checkpoint(folder / "checkpoints", int(words.gib * (1 << 30)))
        out = str(folder / "out")
        command = [sys.executable, "-m", "dsrun", "checkpoint", "export", "--dtype", words.dtype]
        start = time.perf_counter()
        subprocess.run([*command, str(folder / "checkpoints"), out], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        shutil.copytree(folder / "checkpoints", folder / "copy")
        copied = time.perf_counter() - start
    finally:
        shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "gib": words.gib,
                "dtype": words.dtype,
                "seconds": round(seconds, 2),
                "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
                "peak_mib": round(used.ru_maxrss / 1024, 1),
                "copy_seconds": round(copied, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
