"""Runs scripts one after the other in one process, each with words of its own; `+` stands between them.

    python several.py hf_generate.py --output_dir here + /its/own/place/hf_trainer.py --output_dir there

They are run as they are: what they import takes longer than what they train. A path is beside this file, unless it is
a whole one. Accelerate keeps its state in the process, and is told to forget it, as its own tests do.
"""

from __future__ import annotations

import os
import runpy
import sys
from itertools import groupby
from pathlib import Path


def main() -> None:
    environ = dict(os.environ)
    for is_plus, words in groupby(sys.argv[1:], key=lambda word: word == "+"):
        if is_plus:
            continue
        name, *sys.argv[1:] = words
        sys.argv[0] = str(Path(__file__).parent / name)
        runpy.run_path(sys.argv[0], run_name="__main__")
        if "accelerate.state" in sys.modules:
            sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
        # Accelerate leaves there what a script has asked for.
        for variable in [name for name in os.environ if name.startswith("ACCELERATE_") and name not in environ]:
            del os.environ[variable]


if __name__ == "__main__":
    main()
