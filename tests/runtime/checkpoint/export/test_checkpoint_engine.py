"""A writer of files as scripts of DeepSpeed know it: what it saves it loads, and clients put their own `load` in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsrun.runtime.checkpoint.export.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
    TorchCheckpointEngine,
)


@pytest.mark.parametrize("config", [None, SimpleNamespace(checkpoint_config={"checkpoint_serialization": True})])
def test_what_it_saves_it_loads(tmp_path: Path, config: Any) -> None:
    engine = TorchCheckpointEngine(config)
    info = CheckpointCommitInfo("step1", str(tmp_path), save_latest=True)
    engine.makedirs(str(tmp_path / "a" / "b"), exist_ok=True)
    engine.create(info)
    path = str(tmp_path / "a" / "b" / "x.pt")
    engine.save({"x": torch.arange(3), "info": info}, path)
    found = engine.load(path, map_location="cpu")
    assert found["x"].tolist() == [0, 1, 2]
    assert found["info"] == info
    assert engine.commit(info)
    with open(path, "rb") as file:
        assert (file.read(2) == b"PK") == (config is not None)
    assert isinstance(engine, CheckpointEngine)
    assert (engine.name, engine.is_decoupled(), engine.get_commit_info()) == ("TorchCheckpointEngine", False, None)
    assert [engine.is_data_parallel_writer(rank) for rank in range(2)] == [True, False]


#: open-instruct does so, to read pickles whatever torch's default is.
def test_a_client_may_put_its_own_load_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchCheckpointEngine, "load", lambda self, path, map_location=None: (path, map_location))
    assert TorchCheckpointEngine().load("a") == ("a", None)
