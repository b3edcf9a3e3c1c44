"""The guide's config is one that loads, and the keys it tells of are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dsrun.config.findings import Severity
from dsrun.config.load import inspect, load
from dsrun.config.sections.memory import Aio
from dsrun.config.sections.offload import OffloadOptimizer

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "nvme.md").read_text(encoding="utf-8")


def test_the_configs_of_the_guide_load() -> None:
    states, parameters = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    for text in (states, parameters):
        assert [f for f in inspect(json.loads(text)).findings if f.severity is not Severity.NOTE] == []
    zero = load(json.loads(states), world_size=2).zero_optimization
    assert zero.offload_optimizer.nvme_path == ("/mnt/nvme0", "/mnt/nvme1")
    assert load(json.loads(parameters), world_size=2).zero_optimization.offload_param.nvme_path == ("/mnt/nvme0",)


def test_the_keys_of_the_table_are_those_of_the_sections() -> None:
    named = set(re.findall(r"`([a-z_.* ]+)`", "\n".join(re.findall(r"^\| (.*?) \|", GUIDE, re.MULTILINE))))
    keys = {key.strip().removeprefix("aio.") for name in named for key in name.split("*")}
    assert keys <= {*Aio.model_fields, *OffloadOptimizer.model_fields}
    assert {"verify", "buffer_count", "overlap_events"} <= keys
