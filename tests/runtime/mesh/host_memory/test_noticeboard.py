"""Texts reach whoever waits for them, in threads and over the job's store, and leave nothing behind."""

from __future__ import annotations

import threading

import torch.distributed as dist

import dsrun
from dsrun.runtime.compat import HashStore
from dsrun.runtime.mesh.host_memory.noticeboard import LocalNoticeboard, Noticeboard, StoreNoticeboard, noticeboard
from support.ranks import run_ranks


def exchange(board: Noticeboard) -> None:
    never = threading.Event()
    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.append(board.wait("late", until=never.is_set)))
    thread.start()
    board.post("early", b'{"a": 1}')
    assert board.wait("early", until=lambda: True) == b'{"a": 1}'
    board.post("late", "ü".encode())
    thread.join(60)
    assert found == ["ü".encode()]
    board.take_down("late")
    assert board.wait("late", until=lambda: True) is None


def test_texts_among_threads() -> None:
    exchange(LocalNoticeboard())


def test_texts_in_a_store() -> None:
    exchange(StoreNoticeboard(HashStore()))


def _over_ranks() -> str:
    dsrun.init_distributed()
    board = noticeboard()
    rank = dist.get_rank()
    board.post(f"from {rank}", f"{rank}!".encode())
    found = b"".join(board.wait(f"from {other}", until=lambda: False) or b"" for other in range(2))
    return found.decode()


def test_texts_over_ranks() -> None:
    assert run_ranks(2, _over_ranks) == ["0!1!", "0!1!"]
