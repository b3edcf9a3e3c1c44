"""Ranks that do not take the same steps hear who is where, on each of them, and none hangs."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch

import dsrun
from dsrun.contract.environment import RankInfo
from dsrun.errors import DsrunError
from dsrun.runtime.compat import store_of
from support.ranks import run_ranks, wait_for_all
from support.training import batches, config, make_engine

#: What rank 1 does in place of its third step, the others' being two micro steps.
WAYS = ("leaves", "ends", "saves", "steps early", "forgets to step")


def _micro_step(engine: Any) -> None:
    inputs, _ = batches(0, samples=2)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()


def _train(way: str, stage: int, folder: str) -> str:
    dsrun.init_distributed(timeout_s=10)
    engine = make_engine(config(stage, micro=2, accumulation=2))
    for _ in range(4):
        _micro_step(engine)
    try:
        if engine.global_rank == 1 and way != "ends":
            if way == "leaves":
                engine.destroy()
            elif way == "saves":
                engine.save_checkpoint(folder)
            elif way == "steps early":
                engine.set_gradient_accumulation_boundary(True)
                _micro_step(engine)
            else:
                _micro_step(engine)
                inputs, _ = batches(0, samples=2)
                for _ in range(2):
                    engine.backward(engine(inputs).float().square().mean())
        elif engine.global_rank == 0:
            _micro_step(engine)
            _micro_step(engine)
    except DsrunError as error:
        torch.distributed.destroy_process_group()
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_part_name_each_other_and_the_step(way: str, stage: int, tmp_path_factory: Any) -> None:
    zero, one = run_ranks(2, _train, way, stage, str(tmp_path_factory.mktemp("saved")))
    if way in ("leaves", "ends"):
        gone = "left the job" if way == "leaves" else "ended"
        assert zero.startswith(f"rank 1 of this host has {gone} while rank 0 waited for it in ")
        assert re.search(r" in \w+ of unit \d `[\w.]+` \(\d+ bytes\) at step 3", zero), zero
        assert " at step 3, micro step 1; its last collective was " in zero
        assert zero.endswith(" at step 2, micro step 2")
        return
    assert zero.startswith("rank 0 is in ")
    assert one.startswith("rank 1 is in ")
    micro = {"saves": (1, 1), "steps early": (2, 1), "forgets to step": (2, 2)}[way]
    assert f" at step 3, micro step {micro[0]} while rank 1 is in " in zero, zero
    assert zero.endswith(f" at step 3, micro step {micro[1]}"), zero


def _leave_a_batch_out(stage: int) -> str:
    wait_for_all(RankInfo.from_env())
    dsrun.init_distributed(timeout_s=2)
    engine = make_engine(config(stage, micro=2))
    assert torch.distributed.group.WORLD is not None
    gave_up = store_of(torch.distributed.group.WORLD)
    try:
        for step in range(4):
            inputs, _ = batches(step, samples=2)
            loss = engine(inputs).float().square().mean()
            if engine.global_rank == 1 and step == 2:
                continue
            engine.backward(loss)
            engine.step()
        gave_up.wait(["gave up"], timedelta(seconds=20))  # busy elsewhere until rank 0 has
    except DsrunError as error:
        return str(error)
    finally:
        gave_up.set("gave up", "yes")
    return ""


@pytest.mark.depends_on_speed("a time-out of 2 s")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_that_left_a_batch_out_is_named_with_the_step_where_it_did(stage: int) -> None:
    """Below stage 3 ranks go on with other batches, so it shows when the others wait for one more step."""
    zero, one = run_ranks(2, _leave_a_batch_out, stage)
    assert one == ""
    assert "rank 0 waited 2 s for rank 1" in zero, zero
    assert " at step 4, micro step 1; its last collective was " in zero, zero
    assert "(2 forwards before its backward at step 3, micro step 1, 1 before)" in zero, zero
