"""`zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR`: a checkpoint's weights in fp32, as files that others load.

The words are those of DeepSpeed's script of this name, and of `zero_to_torch`, which writes other dtypes too. Of whose
checkpoints, and how the files are written: `checkpoint/convert/fp32_weights.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dsrun.checkpoint_files.storage.registry import place_of
from dsrun.checkpoint_files.storage.tags import tag_to_load
from dsrun.errors import DsrunError, UsageError
from dsrun.units import format_bytes, parse_bytes

#: Dtypes of `--dtype`, as DeepSpeed's script of several dtypes names them.
DTYPES = ("bf16", "bfloat16", "float16", "float32", "fp16", "fp32")


def main(args: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code.

    Args:
        args: words after the script's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Write a checkpoint's weights in fp32.")
    return _run(_with_words(parser).parse_args(args), "fp32")


def main_of_dtypes(args: Sequence[str] | None = None) -> int:
    """Runs the script that writes any dtype, and returns its exit code.

    Args:
        args: words after the script's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(prog="zero_to_torch.py", description="Write a checkpoint's weights.")
    parser.add_argument("--dtype", choices=DTYPES, required=True, help="dtype of what has floating point")
    given = _with_words(parser).parse_args(args)
    return _run(given, given.dtype)


def _with_words(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("checkpoint_dir", help="folder with `latest`, or that of one checkpoint in it")
    parser.add_argument("output_dir", type=Path, help="folder to write the files to")
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="of a file, like 500MB [%(default)s]")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors files, not torch's")
    parser.add_argument("-t", "--tag", help="which checkpoint of the folder, like global_step1 [what `latest` names]")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what is not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    return parser


def _run(given: argparse.Namespace, dtype: str) -> int:
    try:
        folder = place_of(given.checkpoint_dir)
        source = folder if given.tag is None else tag_to_load(folder, given.tag)
        shard_bytes = _size(given.max_shard_size)
        # Torch takes a second to import.
        from dsrun.runtime.checkpoint.convert.fp32_weights import write_weights
        from dsrun.runtime.checkpoint.convert.zero_to_fp32 import OUTPUT_DTYPE_NAMES

        files = write_weights(
            source,
            given.output_dir,
            shard_bytes=shard_bytes,
            dtype=OUTPUT_DTYPE_NAMES[dtype],
            as_safetensors=given.safe_serialization,
            frozen=not given.exclude_frozen_parameters,
        )
    except DsrunError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or given.output_dir}: {error.strerror or error}", file=sys.stderr)
        return DsrunError.exit_code
    for file in files:
        print(f"{file}  {format_bytes(file.stat().st_size)}")
    return 0


def _size(text: str) -> int:
    nbytes = parse_bytes(text)
    if nbytes is None:
        raise UsageError(f"`--max_shard_size` is {text!r}", hint="give a size like `5GB` or `500MiB`")
    return nbytes


if __name__ == "__main__":
    sys.exit(main())
