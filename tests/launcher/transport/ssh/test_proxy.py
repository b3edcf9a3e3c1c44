"""A program that carries a connection: its bytes, its words, and that nothing is left of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dsrun.launcher.transport.ssh.proxy import Proxy


def test_bytes_go_through_and_come_back() -> None:
    proxy = Proxy("cat")
    try:
        proxy.socket.settimeout(20)
        proxy.socket.sendall(b"there and back")
        assert proxy.socket.recv(100) == b"there and back"
    finally:
        proxy.end()


def test_its_end_and_its_last_words_are_known() -> None:
    proxy = Proxy("sh -c 'echo no way there >&2; exit 1'")
    try:
        proxy.socket.settimeout(20)
        assert proxy.socket.recv(100) == b""
        assert proxy.said == "no way there\n"
    finally:
        proxy.end()


@pytest.mark.parametrize("on_term", ["", "trap '' TERM; "], ids=["asked", "killed"])
def test_nothing_is_left_of_it_and_of_what_it_started(tmp_path: Path, on_term: str) -> None:
    pids = tmp_path / "pids"
    proxy = Proxy(f'sh -c "{on_term}sleep 600 & echo $$ \\$! >{pids}; echo up; wait; wait"'.replace("$$", "\\$\\$"))
    proxy.socket.settimeout(20)
    assert proxy.socket.recv(100) == b"up\n"
    shell, child = map(int, pids.read_text().split())
    # Out of reach of the terminal's Ctrl-C.
    assert os.getpgid(shell) != os.getpgid(0)
    proxy.end()
    proxy.end()
    with pytest.raises(ProcessLookupError):
        os.kill(shell, 0)
    # Killed as well; the kernel takes a moment, and of whom nobody waits for, a zombie may stay.
    deadline_s = time.monotonic() + 20
    while not _is_dead(child):
        assert time.monotonic() < deadline_s, "what the proxy started is ended too"
        threading.Event().wait(0.01)


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
