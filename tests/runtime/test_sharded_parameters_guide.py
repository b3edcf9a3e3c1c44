"""docs/guides/sharded-parameters.md and its internals: examples run one after the other, the error is that printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsrun
from dsrun.config.load import load
from dsrun.errors import CheckpointError

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, INTERNALS = ((DOCS / folder / "sharded-parameters.md").read_text() for folder in ("guides", "internals"))


def test_the_examples_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE + INTERNALS, re.S)
    assert len(blocks) == 9
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    torch.manual_seed(3)
    (tmp_path / "weights").mkdir()
    saved = names["Model"]().state_dict()
    save_file(saved, tmp_path / "weights" / "model.safetensors")
    for block in blocks[1:]:
        exec(block, names)
    assert "torch.Size([64, 64]) ZeroParamStatus.NOT_AVAILABLE 4096" in capsys.readouterr().out
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in saved.items():
        expected = value * 0.5 if name == "head.weight" else torch.full((64,), 0.5) if name == "head.bias" else value
        assert torch.equal(found[name], expected.bfloat16()), name

    (keys,) = re.findall(r"```json\n(.*?)```", GUIDE, re.S)
    assert not [finding for finding in load(json.loads(keys)).findings if "zero_optimization" in finding.key]

    saved["head.bias"] = torch.zeros(32)
    saved["lm_head.weight"] = torch.zeros(1)
    save_file(saved, tmp_path / "weights" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        dsrun.zero.load_pretrained(names["Model"](), "weights")
    assert caught.value.render() in GUIDE
