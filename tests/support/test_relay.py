"""The slow line of tests is slow, and loses nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator

import pytest

from support.relay import relay


@pytest.fixture
def echo() -> Generator[tuple[str, int]]:
    """A server that sends back what it is sent, over one connection, and ends with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                while data := client.recv(1 << 16):
                    client.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()
        thread.join(20)
        assert not thread.is_alive()


def test_every_byte_takes_its_time_and_none_is_lost(echo: tuple[str, int]) -> None:
    data = bytes(range(256)) * 8192  # 2 MiB
    with (
        relay(echo, delay_s=0.1) as line,
        socket.create_connection((line.address, line.port)) as client,
        client.makefile("rb") as answers,
    ):
        began_s = time.monotonic()
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        assert time.monotonic() - began_s >= 0.2
        sender = threading.Thread(target=lambda: (client.sendall(data), client.shutdown(socket.SHUT_WR)))
        sender.start()
        assert answers.read() == data
        sender.join(20)
        assert line.carried == [len(data) + 1, len(data) + 1]


def test_a_rate_is_kept_to(echo: tuple[str, int]) -> None:
    with (
        relay(echo, delay_s=0, bytes_per_s=100_000) as line,
        socket.create_connection((line.address, line.port)) as client,
    ):
        began_s = time.monotonic()
        client.sendall(bytes(30_000))
        client.shutdown(socket.SHUT_WR)
        got = 0
        while data := client.recv(1 << 16):
            got += len(data)
        assert got == 30_000
        assert time.monotonic() - began_s >= 0.3
