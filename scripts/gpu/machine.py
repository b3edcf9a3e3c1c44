"""What a machine is, in a process of its own: `python -m gpu.machine cuda /tmp` prints one JSON line.

Who asks CUDA has a context from then on, half a gigabyte of the device, so the driver of the check does not ask itself.
A machine without torch, or without packages that dsrun needs, has an answer too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .packages import installed_version, missing

#: Files in which Linux says what a container may take.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_PATIENCE_S = 120


class MachineError(Exception):
    """The process that was asked failed; the message is the end of what it said."""


def ask(device: str, folder: Path) -> dict[str, Any]:
    """Returns the facts of this machine, asked in a child process.

    Args:
        device: cuda or cpu.
        folder: folder on the drive that is measured.

    Returns:
        `missing` (requirements that are not met), `python`, `cpus`, `memory_bytes`, `disk_bytes` (free); `torch` where
        it is installed; on CUDA, where there is a GPU, `gpu`, `gpu_bytes`, `cuda`, `nccl`.

    Raises:
        MachineError: the child failed.
    """
    words = (sys.executable, "-m", "gpu.machine", device, str(folder))
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"no answer after {_PATIENCE_S} s") from error
    if run.returncode:
        raise MachineError(f"exit code {run.returncode}\n{run.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("folder", type=Path, help="on the drive that is measured")
    args = parser.parse_args()
    facts: dict[str, Any] = {
        "missing": missing(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "disk_bytes": shutil.disk_usage(args.folder).free,
    }
    if (version := installed_version("torch")) is not None:
        facts |= {"torch": version} | (_gpu_facts() if args.device == "cuda" else {})
    print(json.dumps(facts))


def _gpu_facts() -> dict[str, Any]:
    import torch  # a machine without it has an answer too
    import torch.cuda.nccl

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _memory_bytes() -> int:
    """Returns the machine's memory, or what this container may take of it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in _LIMITS if path.exists()]
    return min([whole, *(int(limit) for limit in limits if limit.isdigit())])


if __name__ == "__main__":
    main()
