"""deepspeed.checkpoint.ds_to_universal: universal checkpoints, also as `python -m`."""

import sys

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.as_deepspeed.commands.ds_to_universal": ["main", "parse_arguments", "run"]}
)

if __name__ == "__main__":
    sys.exit(__getattr__("run")())
