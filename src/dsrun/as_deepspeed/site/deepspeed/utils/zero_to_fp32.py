"""deepspeed.utils.zero_to_fp32: a checkpoint's weights in fp32, also as `python -m`."""

import sys

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {"dsrun.runtime.checkpoint.convert.zero_to_fp32": ["*"], "dsrun.as_deepspeed.commands.zero_to_fp32": ["main"]},
)

if __name__ == "__main__":
    sys.exit(__getattr__("main")())
