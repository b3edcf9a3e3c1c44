"""A step's record has each token and each operation of the job once, however its ranks share the work."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from dsrun.contract.environment import ENGINE_ENV, RUN_DIR_ENV
from dsrun.contract.step_records import STEP_EVENT
from support import llama, pipelines
from support.written_records import read_records


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    monkeypatch.delenv(ENGINE_ENV, raising=False)


def last_step(engine: Any) -> dict[str, Any] | None:
    """Returns what the first rank has recorded, with the FLOPs of the step."""
    if engine.global_rank:
        return None
    record = read_records(Path(os.environ[RUN_DIR_ENV]), STEP_EVENT, engine)[-1]
    return {**record, "flops": record["model_tflops"] * record["seconds"]}


def take_batch(engine: Any, data_rank: int) -> dict[str, Any] | None:
    engine.train_batch(itertools.islice(pipelines.items(data_rank), pipelines.MICROS), loss_fn=pipelines.loss_fn)
    return last_step(engine)


@pytest.mark.parametrize(("stages", "data"), [(2, 1), (2, 2)])
def test_stages_count_tokens_once_and_all_operations(stages: int, data: int) -> None:
    (whole,) = pipelines.run(pipelines.Case(), take_batch)
    record, *_ = pipelines.run(pipelines.Case(stages=stages, data=data), take_batch)
    assert whole is not None
    assert record is not None
    seen = [tokens.numel() for rank in range(data) for tokens, _ in itertools.islice(pipelines.items(rank), 4)]
    assert record["tokens"] == sum(seen)
    assert record["flops"] / record["tokens"] == pytest.approx(whole["flops"] / whole["tokens"], rel=0.001)
    assert record["traffic"]["pipe"] > 0
    assert ("data" in record["traffic"]) == (data > 1)


def take_batch_after_one_that_failed(engine: Any, data_rank: int) -> dict[str, Any] | None:
    def fail(*_: object) -> Any:
        raise ArithmeticError

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            engine.train_batch(itertools.islice(pipelines.items(data_rank), pipelines.MICROS), loss_fn=fail)
    return take_batch(engine, data_rank)


def test_a_batch_that_was_given_up_counts_nowhere() -> None:
    (whole,) = pipelines.run(pipelines.Case(), take_batch)
    (record,) = pipelines.run(pipelines.Case(), take_batch_after_one_that_failed)
    assert whole is not None
    assert record is not None
    assert record["tokens"] == whole["tokens"]
    assert record["flops"] == pytest.approx(whole["flops"], rel=0.001)


def take_steps(engine: Any, data_rank: int) -> dict[str, Any] | None:
    for micro in range(2):
        tokens = llama.tokens(0, micro, data_rank)
        engine.backward(F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
        engine.step()
    return last_step(engine)


def test_ranks_that_share_layers_count_tokens_once_and_all_operations() -> None:
    (whole,) = llama.on_threads(1, 1, take_steps)
    record, _ = llama.on_threads(2, 2, take_steps)
    assert whole is not None
    assert record is not None
    assert record["tokens"] == whole["tokens"] == 2 * llama.MICRO * llama.TIME
    assert record["flops"] == pytest.approx(whole["flops"], rel=0.001)
    assert record["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert record["traffic"]["tensor"] > 0
