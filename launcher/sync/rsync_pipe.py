"""What rsync is told to reach a host with, in place of ssh: hands its words and its bytes to the front end.

The front end, at the other end of an inherited socket, starts the words on the host by the transport of the job, so
that a copy logs in as everything else does. A program of its own, which imports nothing of dsrun. See `rsync.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading


def main() -> None:
    """Arguments: the number of the socket, then what rsync adds: a host, and the words to run there."""
    descriptor, _host, *words = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as pipe:
        pipe.sendall(json.dumps(words).encode() + b"\n")
        # rsync waits for the end of what it reads, and closes what it writes; neither waits for the other.
        sender = threading.Thread(target=_send, args=(pipe,), daemon=True)
        sender.start()
        with pipe.makefile("rb", buffering=0) as received, os.fdopen(1, "wb", buffering=0) as to_rsync:
            shutil.copyfileobj(received, to_rsync)


def _send(pipe: socket.socket) -> None:
    while data := os.read(0, 1 << 16):
        pipe.sendall(data)
    pipe.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
