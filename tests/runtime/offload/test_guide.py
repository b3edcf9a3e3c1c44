"""docs/guides/offload.md: what it says of parameters is what a plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsrun.config.load import load
from dsrun.estimate.model.units import from_count
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import read_settings

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "offload.md").read_text()


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
