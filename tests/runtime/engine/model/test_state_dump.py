"""`dump_state` prints what the engine is, one key a line, on the first rank once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dsrun

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": True},
    "dump_state": True,
}
#: All that does not follow from the schema's defaults.
STATE = """\
mesh.world_size = 1
mesh.backend = "gloo"
mesh.device = "cpu"
mesh.axes.pipe = 1
mesh.axes.data = 1
mesh.axes.expert = 1
mesh.axes.ring = 1
mesh.axes.ulysses = 1
mesh.axes.tensor = 1
sharded.optimizer = true
sharded.gradients = true
sharded.parameters = false
precision.compute = "bfloat16"
precision.master = "float32"
precision.sums = "float32"
precision.states = "float32"
units.0 = {"name": "rest", "parameters": 72, "where": {"parameters": "device", "step": "device"}}
optimizer.class = "AdamW"
"""


def dump(capsys: pytest.CaptureFixture[str], config: dict[str, Any]) -> dict[str, str]:
    engine, *_ = dsrun.initialize(model=nn.Linear(8, 8), config=config)
    engine.backward(engine(torch.ones(2, 8, dtype=next(engine.parameters()).dtype)).float().mean())
    engine.step()
    engine.destroy()
    lines = [
        line.removeprefix("dsrun: state: ") for line in capsys.readouterr().out.splitlines() if ": state: " in line
    ]
    told = dict(line.split(" = ", 1) for line in lines)
    assert len(told) == len(lines), "each key once"
    return told


@pytest.mark.skipif(torch.cuda.is_available(), reason="says the device")
def test_the_state_is_told_one_key_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    told = dump(capsys, CONFIG)
    shown = {key: value for key, value in told.items() if not key.startswith(("config.", "predicted.", "optimizer.g"))}
    assert "".join(f"{key} = {value}\n" for key, value in shown.items()) == STATE
    assert told["config.zero_optimization.stage"] == "2"
    assert told["config.train_batch_size"] == "2"
    assert told["config.optimizer.params.lr"] == "0.001"
    assert told["optimizer.groups.0"].startswith('{"tensors": 1, "lr": 0.001, "betas": [0.9, 0.999]')
    assert int(told["predicted.state_bytes"]) > 72 * 16
    assert told["predicted.host_bytes"] == "0"


def test_secrets_of_trackers_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = dump(
        capsys,
        {
            **CONFIG,
            "comet": {"enabled": True, "api_key": "key-of-mine"},
            "mlflow": {"enabled": True, "tracking_uri": "https://me:word-of-mine@host/runs"},
        },
    )
    assert (told["config.comet.api_key"], told["config.mlflow.tracking_uri"]) == ('"***"', '"***"')
    assert "of-mine" not in str(told)


def test_without_the_key_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert dump(capsys, {**CONFIG, "dump_state": False}) == {}
