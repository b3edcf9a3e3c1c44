"""DeepSpeed's aio, in a process of its own: `python deepspeed_aio.py FILE NBYTES`.

Its defaults (blocks of 1 MiB, 8 at once, one thread) and a buffer that it has page-locked. Says one line when it is
ready, and for each line on stdin (`read` or `write`) moves the file once and answers with its seconds. The end of stdin
ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time

# What the libraries print goes to stderr: stdout is for answers.
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def main() -> None:
    """Answers until stdin ends."""
    path, nbytes = sys.argv[1], int(sys.argv[2])
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    buffer.random_(0, 255)
    moves = {"write": handle.sync_pwrite, "read": handle.sync_pread}
    moves["write"](buffer, path, 0)
    print(json.dumps("ready"), file=_ANSWERS, flush=True)
    for line in sys.stdin:
        began_s = time.perf_counter()
        moves[line.strip()](buffer, path, 0)
        print(json.dumps(time.perf_counter() - began_s), file=_ANSWERS, flush=True)


if __name__ == "__main__":
    main()
