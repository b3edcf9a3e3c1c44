"""DeepSpeed's command-line arguments for scripts that parse their own. Nothing is read here."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed`, `--deepspeed_config` and `--local_rank` to a script's parser and returns it.

    `dsrun.initialize(args=...)` reads `args.deepspeed_config`.
    """
    group = parser.add_argument_group("dsrun", "training engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted for scripts written for DeepSpeed; no effect")
    group.add_argument("--deepspeed_config", default=None, metavar="PATH", help="training config")
    group.add_argument("--local_rank", type=int, default=-1, help="accepted; the environment's LOCAL_RANK decides")
    return parser
