"""How many threads operations use is one thread's own business: no other one's, and of none that begins later."""

from __future__ import annotations

import os
from threading import Event, Thread
from typing import Any

import torch

from dsrun.runtime.compat import set_own_threads
from dsrun.runtime.offload.step.inner_threads import inner_threads
from support.inside_engine import deferred_update_of
from support.ranks import run_ranks
from support.training import config, make_engine, train

_DEADLINE_S = 60.0


def _seen_by_a_new_thread() -> int:
    seen: list[int] = []
    thread = Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join(_DEADLINE_S)
    return seen[0]


def _alone() -> None:
    torch.set_num_threads(3)
    found: dict[str, int] = {}
    is_set, may_end = Event(), Event()

    def other() -> None:
        set_own_threads(5)
        found["own"] = torch.get_num_threads()
        is_set.set()
        assert may_end.wait(_DEADLINE_S)
        with inner_threads(1):
            found["inner"] = torch.get_num_threads()
            found["new, meanwhile"] = _seen_by_a_new_thread()
        found["own, afterwards"] = torch.get_num_threads()

    thread = Thread(target=other)
    thread.start()
    assert is_set.wait(_DEADLINE_S)
    assert torch.get_num_threads() == 3
    assert _seen_by_a_new_thread() == 3, "it has taken what was set for the process"
    may_end.set()
    thread.join(_DEADLINE_S)
    assert found == {"own": 5, "inner": 1, "new, meanwhile": 3, "own, afterwards": 5}


def _with_an_engine() -> None:
    torch.set_num_threads(3)
    settings: dict[str, Any] = config(2, micro=2)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "cpuadam_cores_perc": 0.0}
    engine = make_engine(settings)
    assert torch.get_num_threads() == _seen_by_a_new_thread() == 3
    train(engine, range(2), samples=2)
    deferred_update_of(engine).settle()
    assert torch.get_num_threads() == _seen_by_a_new_thread() == 3
    stepping = deferred_update_of(engine)._host._thread
    cores = stepping.submit(lambda: (torch.get_num_threads(), len(os.sched_getaffinity(0)))).result(_DEADLINE_S)
    assert cores == ((1, 1) if len(os.sched_getaffinity(0)) > 1 else (3, 1))
    engine.destroy()


def test_the_number_of_a_thread_is_its_own() -> None:
    run_ranks(1, _alone)


def test_an_engine_leaves_the_process_its_number_of_threads() -> None:
    run_ranks(1, _with_an_engine)
