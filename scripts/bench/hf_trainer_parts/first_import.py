"""Prints what the first `import deepspeed` takes in a process that has torch, and what its engine's class takes then.

    python first_import.py          JSON: seconds and bytes resident of each, and whether it is dsrun's

Whichever `deepspeed` is on the path is measured.
"""

from __future__ import annotations

import json
import re
import time
from importlib import import_module
from pathlib import Path


def _resident() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "/proc/self/status has no VmRSS"
    return int(found[1]) * 1024


def main() -> None:
    """Imports and prints."""
    import_module("torch")
    had, began_s = _resident(), time.perf_counter()
    import deepspeed  # pyright: ignore[reportMissingImports]

    named_s, named = time.perf_counter(), _resident()
    # Names that come on their first use.
    assert deepspeed.initialize
    assert deepspeed.DeepSpeedEngine
    whole_s, whole = time.perf_counter(), _resident()
    facts = {
        "import_s": named_s - began_s,
        "import_bytes": named - had,
        "engine_s": whole_s - began_s,
        "engine_bytes": whole - had,
        "version": deepspeed.__version__,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
