"""The guide to axes: what its examples print, and what the plan says of each row of its table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.estimate.model.units import from_count
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.settings import RunSettings
from dsrun.units import format_duration
from support.cli import invoke
from support.planned_machines import gpus

GUIDE = (Path(__file__).parents[3] / "docs/guides/axes.md").read_text()
FITTED = re.findall(r"```console\n\$ dsrun (plan [^\n]+) > ds\.json\n(.*?)```", GUIDE, re.S)
SHOWN = re.findall(r"```console\n\$ dsrun (plan [^\n>]+)\n```", GUIDE)
BF16 = RunSettings(compute_bytes=2, sequence=4096)


def plan(billions: float, name: str, ranks: int, settings: RunSettings) -> Prediction:
    return predict(from_count(round(billions * 10**9)), settings, gpus(name, ranks, host_memory=2 << 40))


def seconds(prediction: Prediction) -> float:
    assert prediction.step.seconds is not None
    return prediction.step.seconds


def largest(prediction: Prediction) -> str:
    return max(prediction.tiers[0].lines, key=lambda line: line.size_bytes or 0).name


@pytest.mark.parametrize(("words", "said"), FITTED, ids=[words for words, _ in FITTED])
def test_a_fitted_example_changes_what_the_guide_shows(words: str, said: str, tmp_path: Path) -> None:
    result = invoke(*words.split())
    assert result.exit_code == 0
    assert result.stderr.split() == said.split()
    path = tmp_path / "ds.json"
    path.write_text(result.stdout)
    printed = json.loads(invoke(*words.removesuffix(" --fit").split(), "--config", str(path), "--json").stdout)
    assert printed["fits"]
    assert f"a step of at least {format_duration(printed['step']['floor_s'])}" in result.stderr


@pytest.mark.parametrize("words", SHOWN)
def test_other_examples_print_a_plan(words: str) -> None:
    result = invoke(*words.split())
    assert (result.exit_code, result.stderr) == (0, "")
    assert "layouts at stage" in result.stdout


def test_the_guide_has_three_examples_and_two_commands_more() -> None:
    assert (len(FITTED), len(SHOWN)) == (3, 2)


def test_more_data_ranks_compute_more_samples_in_the_same_time() -> None:
    one, two = (plan(1, "H100-80G", ranks, replace(BF16, stage=1)) for ranks in (4, 8))
    assert one.fits
    assert one.step.bottleneck == "compute"
    assert two.tokens_per_step == 2 * one.tokens_per_step
    assert 0.9 * seconds(one) < seconds(two) <= seconds(one), "each has a smaller part to update"


def test_zero_shares_out_what_each_would_hold() -> None:
    asked = replace(BF16, sequence=1024)
    found = [plan(7, "A100-40G", 8, replace(asked, stage=stage)) for stage in range(4)]
    assert [one.fits for one in found] == [False, False, True, True]
    assert largest(found[0]) in ("optimizer states", "master weights")


def test_recomputation_makes_room_of_activations_for_a_third_more_computing() -> None:
    asked = replace(BF16, stage=3, micro_batch=2)
    kept, again = (plan(13, "A100-80G", 8, replace(asked, recompute=how)) for how in ("none", "blocks"))
    assert largest(kept) == "activations"
    assert (kept.fits, again.fits) == (False, True)
    assert seconds(again) / seconds(kept) < 4 / 3


def test_one_gpu_offloads() -> None:
    asked = replace(BF16, sequence=1024)
    assert not any(plan(7, "RTX4090-24G", 1, replace(asked, stage=stage)).fits for stage in range(4))
    assert plan(7, "RTX4090-24G", 1, replace(asked, stage=2, offload_optimizer="cpu")).fits


def test_several_gpus_for_which_stage_3_is_too_large_offload() -> None:
    asked = replace(BF16, stage=3, recompute="blocks")
    assert plan(70, "H100-80G", 8, asked).fits is False
    assert plan(70, "H100-80G", 8, replace(asked, offload_optimizer="cpu")).fits


def test_tensor_ranks_share_activations_that_are_too_large_recomputed() -> None:
    asked = replace(BF16, stage=3, sequence=65536, recompute="blocks")
    alone = plan(13, "H100-80G", 8, asked)
    assert alone.fits is False
    assert largest(alone) in ("activations", "logits and loss")
    shared = replace(asked, axis_sizes={"tensor": 8}, sequence_slices=True)
    assert plan(13, "H100-80G", 8, shared).fits


def test_stages_over_hosts_gather_no_parameters() -> None:
    """128 samples an update in both."""
    inside = replace(BF16, axis_sizes={"tensor": 8}, sequence_slices=True, recompute="blocks", sequence=4096)
    gathered = plan(405, "H100-80G", 128, replace(inside, stage=3, accumulation_steps=8))
    assert gathered.fits
    assert gathered.step.bottleneck == "data"
    stages = replace(inside, axis_sizes={"tensor": 8, "pipe": 16}, once_an_update=True, accumulation_steps=128)
    piped = plan(405, "H100-80G", 128, replace(stages, stage=2))
    assert piped.fits
    assert seconds(piped) < 0.9 * seconds(gathered)


def test_more_micro_batches_or_chunks_fill_a_schedule() -> None:
    asked = replace(BF16, stage=1, axis_sizes={"pipe": 4}, once_an_update=True, accumulation_steps=8)
    waits = [
        plan(7, "H100-80G", 8, one).pipeline
        for one in (
            asked,
            replace(asked, accumulation_steps=32),
            replace(asked, schedule="interleaved", chunks_per_rank=4),
        )
    ]
    few, more, chunks = (one.bubble for one in waits if one is not None)
    assert few > 0.25
    assert more < few / 2
    assert chunks < few / 2


def test_sequence_ranks_share_a_sample_that_tensor_ranks_cannot_hold() -> None:
    asked = replace(BF16, stage=3, sequence=1 << 20, recompute="blocks", sequence_slices=True)
    alone = plan(13, "H100-80G", 32, replace(asked, axis_sizes={"tensor": 8}))
    assert alone.fits is False
    assert largest(alone) == "activations"
    assert plan(13, "H100-80G", 32, replace(asked, axis_sizes={"tensor": 8, "ulysses": 4})).fits
    words = ("plan", "13B", "--gpus", "4x8xH100-80G", "--seq", "1048576", "--recompute", "blocks", "--axes", "t8u4")
    told = json.loads(invoke(*words, "--json").stdout)
    assert (told["fits"], told["runs"]) == (True, False), "the axis is planned"


def test_the_three_numbers_are_what_the_guide_says() -> None:
    flops, nvlink, network = 500e12, 400e9, 45e9

    def least_width(ranks: int, link: float) -> float:
        return 2 * (ranks - 1) * flops / (9 * link) / 0.2

    widths = [least_width(8, nvlink), least_width(4, nvlink), least_width(2, network)]
    assert [round(width, -2) for width in widths] == [9700, 4200, 12300]
    for said, width in zip(("9,800", "4,200", "12,400"), widths, strict=True):
        assert said in GUIDE
        assert 0 <= int(said.replace(",", "")) - width < 100
    assert round(flops / network, -3) == 11_000
    assert "11,000 at 45 GB/s" in GUIDE
