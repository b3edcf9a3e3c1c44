"""Messages come whole and in order, with their descriptors, until the other end is gone."""

from __future__ import annotations

import os
import socket

from dsrun.checkpoint_files.writer.messages import is_gone, receive, send


def test_messages_come_with_their_descriptors(tmp_path: object) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reading, writing = os.pipe()
        send(ours, {"a": [1, "ü", None]}, descriptors=(writing,))
        send(ours, "x" * 100_000)
        os.close(writing)
        came = receive(theirs)
        assert came is not None
        value, (descriptor,) = came
        assert value == {"a": [1, "ü", None]}
        os.write(descriptor, b"through")
        os.close(descriptor)
        assert os.read(reading, 10) == b"through"
        os.close(reading)
        assert receive(theirs) == ("x" * 100_000, [])


def test_an_end_that_is_gone_is_noticed_also_in_the_middle_of_a_message() -> None:
    for begun in (b"", (10).to_bytes(8, "little")[:3], (10).to_bytes(8, "little") + b"12"):
        ours, theirs = socket.socketpair()
        with theirs:
            assert not is_gone(theirs)
            ours.sendall(begun)
            assert not is_gone(theirs)
            ours.close()
            assert receive(theirs) is None
            assert is_gone(theirs)
