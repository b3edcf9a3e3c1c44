"""The file `zero_to_fp32.py` that DeepSpeed's users find beside their checkpoints. What it does is `zero_to_fp32`'s."""

from __future__ import annotations

from pathlib import Path

from dsrun.files.atomic import write_atomic

NAME = "zero_to_fp32.py"
TEXT = '''"""Writes the weights of a checkpoint of dsrun in fp32: `python zero_to_fp32.py . OUTPUT_DIR`, see `--help`.

It needs dsrun, and no GPU. The checkpoint is no DeepSpeed's: `dsrun checkpoint show .` says what is in it.
"""

import sys

try:
    from dsrun.as_deepspeed.commands.zero_to_fp32 import main
except ModuleNotFoundError as error:
    if error.name != "dsrun":
        raise
    sys.exit(f"error: {sys.argv[0]}: {sys.executable} has no dsrun\\nhint: `pip install dsrun`")

if __name__ == "__main__":
    sys.exit(main())
'''


def leave_script(folder: Path) -> None:
    """Writes the script into a folder of checkpoints, unless it is there as it should be.

    Args:
        folder: the folder that tags are in; made where it is missing.

    Raises:
        OSError: the file system refuses.
    """
    path = folder / NAME
    data = TEXT.encode()
    try:
        if path.read_bytes() == data:
            return
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
