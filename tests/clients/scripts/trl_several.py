"""Runs scripts of this folder one after the other in one process, each with words of its own; `+` stands between them.

    python trl_several.py trl_sft.py --out here + trl_dpo.py --out there

They are run as they are: what they import takes longer than what they train.
"""

from __future__ import annotations

import runpy
import sys
from itertools import groupby
from pathlib import Path


def main() -> None:
    for is_plus, words in groupby(sys.argv[1:], key=lambda word: word == "+"):
        if not is_plus:
            name, *sys.argv[1:] = words
            sys.argv[0] = str(Path(__file__).parent / name)
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
