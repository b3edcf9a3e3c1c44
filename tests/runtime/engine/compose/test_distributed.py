"""A group that a script joins by `init_distributed`: how long its ranks wait, and that it outlasts engines."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from torch import nn

import dsrun
from dsrun.contract.environment import AS_DEEPSPEED_ENV, GROUP_TIMEOUT_ENV
from dsrun.errors import InputError
from support.forked_programs import Ended, run_programs
from support.ranks import run_ranks
from support.training import config, make_engine

PROGRAM = """
import os
os.environ.update(%r)
import dsrun
from dsrun.runtime.compat import timeout_of
import torch.distributed as dist
dsrun.init_distributed(%s)
assert dist.group.WORLD is not None
print(timeout_of(dist.group.WORLD))
"""
#: Variables, the script's own argument, and the seconds that the group then waits.
WAITS: list[tuple[dict[str, str], str, float]] = [
    ({"DEEPSPEED_TIMEOUT": "3"}, "", 2400),
    ({GROUP_TIMEOUT_ENV: "9600"}, "", 9600),
    ({}, "timeout_s=7", 7),
    ({GROUP_TIMEOUT_ENV: "9600", "DEEPSPEED_TIMEOUT": "3", AS_DEEPSPEED_ENV: "0.19.8"}, "", 180),
]


@functools.cache
def _ended() -> list[Ended]:
    """How all programs ended; each is a process without a launcher, and they have one import of torch in common."""
    return run_programs([PROGRAM % ({"CUDA_VISIBLE_DEVICES": "", **told}, argument) for told, argument, _ in WAITS])


@pytest.mark.parametrize("number", range(len(WAITS)))
def test_groups_wait_as_long_as_the_script_says_else_as_the_launcher_does(number: int) -> None:
    ended = _ended()[number]
    assert ended.code == 0, ended.err
    assert float(ended.out) == WAITS[number][2]


@pytest.mark.parametrize("minutes", ["0", "-1", "2.5", "long"])
def test_minutes_that_are_none_are_refused(minutes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AS_DEEPSPEED_ENV, "0.19.8")
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    with pytest.raises(InputError, match=f"DEEPSPEED_TIMEOUT is '{minutes}'; expected a whole number of minutes"):
        dsrun.init_distributed()


def _end(order: str) -> list[bool]:
    """Does what `order` says, word by word; returns after each whether there is a group that works."""
    engines: list[object] = []
    there: list[bool] = []
    for word in order.split():
        if word == "join":
            dsrun.init_distributed()
        elif word == "comm":
            dsrun.comm.init_distributed("gloo")
        elif word == "end":
            dist.destroy_process_group()
        elif word == "engine":
            engines.append(make_engine(config(1 + 2 * (len(engines) % 2), micro=2), model=nn.Linear(3, 3)))
        elif word == "build":
            with dsrun.zero.Init():
                model = nn.Linear(3, 3)
            engines.append(make_engine(config(3, micro=2), model=model))
        elif word == "drop":
            engines.pop()
        else:
            engines[int(word)].destroy()  # type: ignore[attr-defined]
        there.append(dist.is_initialized())
        if there[-1]:
            dist.barrier()
    return there


ORDERS = {
    "join engine 0": "111",
    "comm engine 0 0 engine 1": "111111",
    "engine join 0": "111",
    "engine 0 join engine 1": "10111",
    "join engine engine 1 0": "11111",
    "engine join engine 0 1": "11111",
    "join end engine 0": "1010",
    "engine engine 0 1": "1110",
    "engine engine 0 0 drop join": "111111",
    "engine engine drop engine 0 1": "111110",
    "engine 0 0 engine 1": "10010",
    "engine drop engine 0": "1110",
    "join engine drop engine 0": "11111",
    "join build 0": "111",
    "build 0 build 1 build 2 build 3": "10101010",
}


def _end_all() -> dict[str, str]:
    found: dict[str, str] = {}
    for order in ORDERS:
        found[order] = "".join(str(int(there)) for there in _end(order))
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_a_group_that_initialize_made_alone_ends_with_the_last_engine(world_size: int) -> None:
    for found in run_ranks(world_size, _end_all):
        assert found == ORDERS
