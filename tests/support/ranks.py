"""Ranks as real processes over Gloo, forked from a server that has imported torch: 0.1 s a start instead of seconds."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dsrun.contract.environment import RankInfo
from dsrun.runtime.compat import TCPStore

# A process has one such server, whichever module asks: what it imports is said here alone, for a second word replaces
# the first, and then every rank of every test imports torch or dsrun by itself.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["pytest", "torch", "torch.distributed", "torch._dynamo", "support.preloaded"])


def wait_for_all(info: RankInfo) -> None:
    """Waits until all ranks of `run_ranks` have come here: for those that join with a time-out of a few seconds."""
    store = TCPStore(info.master_addr, info.master_port, wait_for_workers=False)
    store.set(f"here/{info.rank}", "")
    store.wait([f"here/{rank}" for rank in range(info.world_size)], timedelta(seconds=60))


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Runs `body(*args)` on every rank and returns the results in rank order.

    Args:
        world_size: ranks to start; each finds its place in the environment, as under the launcher.
        body: a function at the top of a test file or of a module under tests/support.
        args: plain values.
        timeout_s: longest wait in seconds for the next rank that ends; it begins anew after each one.

    Raises:
        AssertionError: a rank raised (with its traceback) or did not end in time.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[Any] = []
    ends: list[Connection] = []
    for rank in range(world_size):
        info = RankInfo(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_port=store.port,
            agent_store=True,
        )
        ours, theirs = forkserver.Pipe(duplex=False)
        process = forkserver.Process(
            target=_run, args=(theirs, info.to_env(), inspect.getfile(body), body.__name__, args), daemon=True
        )
        start(process)
        theirs.close()
        processes.append(process)
        ends.append(ours)
    try:
        results: dict[int, Any] = {}
        failures: list[str] = []
        while len(results) + len(failures) < world_size:
            ready = wait([end for rank, end in enumerate(ends) if rank not in results], timeout=timeout_s)
            assert ready, f"ranks did not end within {timeout_s} s: {sorted(set(range(world_size)) - set(results))}"
            for end in ready:
                rank = ends.index(end)  # type: ignore[arg-type]
                try:
                    ok, value = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process died"
                assert ok, f"rank {rank} of {world_size}: {value}"
                results[rank] = value
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        for end in ends:
            end.close()


def start(process: BaseProcess) -> None:
    """Starts a process of `forkserver`, and before the first one the server, which finds what tests import.

    A server of Python 3.11 does not get the path of this process, and passes over what it cannot import without a word.
    """
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), path]))
    try:
        ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if path is not None:
            os.environ["PYTHONPATH"] = path
    process.start()


def _function(path: str, name: str) -> Callable[..., Any]:
    """Returns a function of a file; pytest gives test files names that a fresh process cannot import."""
    spec = importlib.util.spec_from_file_location("body_of_ranks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return getattr(module, name)


def _run(end: Connection, env: dict[str, str], path: str, name: str, args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        answer = (True, _function(path, name)(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own shares tensors by descriptors, which end with this process.
    end.send_bytes(pickle.dumps(answer))
    end.close()
    if dist.is_initialized():
        dist.destroy_process_group()
