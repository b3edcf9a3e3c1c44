"""Messages between a rank and its writer: JSON values on a socket pair, with descriptors where some are handed over."""

from __future__ import annotations

import json
import os
import select
import socket
from typing import Any

#: What a rank may hand over with one message.
MOST_DESCRIPTORS = 64
_LENGTH_BYTES = 8


def send(end: socket.socket, value: object, *, descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message.

    Raises:
        OSError: the other end is gone.
    """
    text = json.dumps(value).encode()
    if descriptors:
        socket.send_fds(end, [len(text).to_bytes(_LENGTH_BYTES, "little")], list(descriptors))
    else:
        end.sendall(len(text).to_bytes(_LENGTH_BYTES, "little"))
    end.sendall(text)


def receive(end: socket.socket) -> tuple[Any, list[int]] | None:
    """Waits for one message and returns it with the descriptors that came with it; None where the other end is gone."""
    descriptors: list[int] = []
    start = b""
    while len(start) < _LENGTH_BYTES:
        try:
            part, came, _, _ = socket.recv_fds(end, _LENGTH_BYTES - len(start), MOST_DESCRIPTORS)
        except ConnectionError:
            part, came = b"", []
        descriptors += came
        if not part:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        start += part
    text = _exactly(end, int.from_bytes(start, "little"))
    return None if text is None else (json.loads(text), descriptors)


def is_gone(end: socket.socket) -> bool:
    """Whether the other end is gone, without waiting and without taking a message."""
    readable, _, _ = select.select([end], [], [], 0)
    try:
        return bool(readable) and end.recv(1, socket.MSG_PEEK) == b""
    except ConnectionError:
        return True


def _exactly(end: socket.socket, nbytes: int) -> bytes | None:
    parts: list[bytes] = []
    while nbytes:
        try:
            part = end.recv(min(nbytes, 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)
