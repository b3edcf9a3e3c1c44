"""What the server of test ranks does once, so that no rank does it again. It is imported there, last, and nowhere else.

Besides imports, it builds the validators of every section of the config, which pydantic leaves to the first config that
is loaded: 0.05 s of the 0.06 s that a small engine takes. All that is there then is taken out of the garbage
collector's sight, as in a job's spawner: ranks that collect, and those that look at every object, look at their own.
"""

from __future__ import annotations

import atexit
import gc
import sys

import dsrun.runtime.engine.initialize  # noqa: F401
from dsrun.config.config import Config
from dsrun.config.show.keys import all_keys

# The whole config too, which no key has as its section: those at the top are Training's, from which it is derived.
for section in {Config, *(key.section for key in all_keys())}:
    section.model_rebuild()
gc.collect()
gc.freeze()
if "triton" in sys.modules:
    # As in the ranks of a job: what is frozen is freed at the end all the same, or nanobind calls it leaked.
    atexit.register(gc.unfreeze)
