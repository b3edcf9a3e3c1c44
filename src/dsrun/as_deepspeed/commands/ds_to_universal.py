"""`ds_to_universal --input_folder CHECKPOINT --output_folder UNIVERSAL`, with the words of DeepSpeed's script.

What it makes, and of what: `convert/to_universal.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dsrun.errors import DsrunError

#: There are no slices of ranks that would be put together one after the other.
_NO_EFFECT = "no effect: tensors are read whole"


def parse_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the script's words.

    Args:
        args: words after the script's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(prog="ds_to_universal", description="Make a universal checkpoint of another one.")
    parser.add_argument("--input_folder", required=True, help="folder of a checkpoint, of dsrun's or DeepSpeed's")
    parser.add_argument("--output_folder", required=True, help="folder to make; `latest_universal` beside names it")
    parser.add_argument("--num_extract_workers", default=4, type=int, help=_NO_EFFECT)
    parser.add_argument("--num_merge_workers", default=2, type=int, help=_NO_EFFECT)
    parser.add_argument("--keep_temp_folder", action="store_true", help="no effect: there are no intermediate files")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="no effect: it is checked always")
    parser.add_argument("--inject_missing_state", action="store_true", help="no effect: nothing more is needed")
    return parser.parse_args(args)


def main(args: argparse.Namespace) -> None:
    """Makes the universal checkpoint.

    Args:
        args: the script's words, of which `input_folder` and `output_folder` count.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the output is something else already.
        OSError: the file system refuses.
    """
    # Torch takes a second to import.
    from dsrun.runtime.checkpoint.convert.to_universal import to_universal

    out = Path(args.output_folder)
    for text in to_universal(Path(args.input_folder), out):
        print(f"dsrun: not taken over: {text}", file=sys.stderr)
    print(f"{out}: dsrun and DeepSpeed load it, at any ZeRO stage and number of ranks")


def run(args: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code.

    Args:
        args: words after the script's name; None for those of this process.
    """
    words = parse_arguments(args)
    try:
        main(words)
    except DsrunError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or words.output_folder}: {error.strerror or error}", file=sys.stderr)
        return DsrunError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run())
