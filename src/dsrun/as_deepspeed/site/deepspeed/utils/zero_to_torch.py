"""deepspeed.utils.zero_to_torch: a checkpoint's weights in a dtype, also as `python -m`."""

import sys

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.as_deepspeed.commands.zero_to_fp32": ["main_of_dtypes as main"]})

if __name__ == "__main__":
    sys.exit(__getattr__("main")())
