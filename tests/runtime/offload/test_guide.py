"""docs/guides/offload.md: what it says of parameters and of a plan is what a plan says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from dsrun.config.load import load
from dsrun.estimate.model.units import from_count
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import read_settings

ROOT = Path(__file__).parents[3]
GUIDE, INTERNALS = ((ROOT / "docs" / folder / "offload.md").read_text() for folder in ("guides", "internals"))


def test_the_lines_of_a_plan_are_those_of_the_whole_one() -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", GUIDE, re.S)
    (whole,) = re.findall(r"```console\n(.*?)```", INTERNALS, re.S)
    assert [line for line in shown.splitlines() if line not in whole.splitlines()] == []


def test_the_bytes_that_a_recipe_streams_are_those_of_the_guide() -> None:
    config = load(ROOT / "configs" / "finetune-7b-1x24gb-offload.json", world_size=1)
    gpu = find_gpu("RTX4090-24G")
    machine = Machine(label="one", ranks=1, ranks_per_host=1, gpu=gpu, gpu_memory_bytes=gpu.memory_bytes)
    settings = read_settings(config, ranks=1, sequence=1024)
    assert (settings.micro_batch, settings.accumulation_steps) == (16, 1)
    for micro, steps, words in ((16, 1, "brings {} GiB a step"), (1, 16, "of one sample bring {} GiB")):
        split = replace(settings, micro_batch=micro, accumulation_steps=steps)
        traffic = predict(from_count(7 * 10**9), split, machine).traffic
        assert words.format(f"{traffic.pcie_to_gpu_bytes / (1 << 30):.1f}") in " ".join(GUIDE.split())
