"""deepspeed.utils.nvtx: ranges of profilers."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.runtime.deepspeed.timers": ["instrument_w_nvtx"]})
