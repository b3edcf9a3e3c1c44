"""Sizes that a config leaves open are those with the most samples a second, of all that it could have as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from dsrun.config.config import Config
from dsrun.config.load import inspect
from dsrun.errors import ConfigError, UsageError
from dsrun.estimate.model.units import ModelSize, from_architecture, from_count
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.catalogue import CAUTIOUS
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings, read_settings
from dsrun.estimate.search.layouts import has_blocks
from dsrun.estimate.search.open_axes import PlannedAxes, plan_open_axes
from support.planned_machines import gpus

BILLION = 10**9
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}


def document(**axes: Any) -> dict[str, Any]:
    """A config with sizes of axes, as numbers or `auto`."""
    sections: dict[str, Any] = {}
    if "pipe" in axes:
        sections["pipeline"] = {"stages": axes["pipe"]}
    if "tensor" in axes:
        sections["tensor_parallel"] = {"autotp_size": axes["tensor"]}
    return {**SETTINGS, **axes.get("more", {}), **sections}


def read(config: dict[str, Any], on: Machine) -> Config | None:
    return inspect(config, world_size=on.ranks).config


def settings_of(on: Machine) -> Any:
    def settings(config: Config) -> RunSettings:
        return read_settings(config, ranks=on.ranks, sequence=2048)

    return settings


def planned(model: ModelSize, on: Machine, config: dict[str, Any]) -> PlannedAxes | None:
    loaded = inspect(config).config
    assert loaded is not None

    def reread(sizes: Mapping[str, int]) -> Config | None:
        return inspect(config, world_size=on.ranks, planned=sizes).config

    return plan_open_axes(loaded, model, on, reread=reread, settings_of=settings_of(on))


def written(model: ModelSize, on: Machine, sizes: Mapping[str, int], more: dict[str, Any]) -> Prediction | None:
    """The prediction of a config with numbers in it; None where it cannot be."""
    config = read(document(**sizes, more=more), on)
    if config is None:
        return None
    try:
        settings = settings_of(on)(config)
    except ConfigError:
        return None
    return predict(model, settings, on) if has_blocks(model, settings) else None


def seconds_a_sample(prediction: Prediction) -> float:
    if prediction.fits is False:
        return inf
    assert prediction.step.seconds is not None
    settings = prediction.settings
    ranks = settings.ranks_of("batch", prediction.machine.ranks)
    return prediction.step.seconds / (settings.micro_batch * settings.accumulation_steps * ranks)


@pytest.mark.parametrize("open_axes", [("tensor",), ("pipe",), ("pipe", "tensor")], ids="+".join)
@pytest.mark.parametrize("count", [7, 13, 30])
def test_no_numbers_in_their_place_are_faster(open_axes: tuple[str, ...], count: int) -> None:
    model, on = from_count(count * BILLION), gpus("A100-80G", 8)
    found = planned(model, on, document(**dict.fromkeys(open_axes, "auto")))
    assert found is not None
    assert set(found.sizes) == set(open_axes)
    each = [
        {axis: size for axis, size in (("pipe", pipe), ("tensor", tensor)) if axis in open_axes}
        for pipe in (1, 2, 4, 8)
        for tensor in (1, 2, 4, 8)
    ]
    others = [one for sizes in each if (one := written(model, on, sizes, {})) is not None]
    assert seconds_a_sample(found.prediction) <= 1.001 * min(map(seconds_a_sample, others))
    mine = written(model, on, found.sizes, {})
    assert mine is not None
    assert seconds_a_sample(mine) == seconds_a_sample(found.prediction)
    assert {axis: found.tried[axis] for axis in open_axes} == dict.fromkeys(open_axes, (1, 2, 4, 8))


def test_the_batch_that_a_config_says_decides_which_sizes_it_takes() -> None:
    """16 samples of an update with micro batches of 8 are for two data ranks at most, so that four of eight share."""
    on = gpus("A100-80G", 8)
    more = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    found = planned(from_count(BILLION), on, document(tensor="auto", more=more))
    assert found is not None
    assert found.sizes["tensor"] >= 4
    batch = found.prediction.settings
    assert batch.micro_batch * batch.accumulation_steps * batch.ranks_of("batch", 8) == 16
    more = {**more, "train_batch_size": 24}
    assert planned(from_count(BILLION), on, document(tensor="auto", more=more)) is None


def test_ranks_that_share_a_layer_are_on_one_host_unless_nothing_else_fits() -> None:
    roomy, narrow = gpus("A100-80G", 8, per_host=2), replace(gpus("A100-80G", 8, per_host=2), gpu_memory_bytes=30 << 30)
    config = document(tensor="auto", more={"zero_optimization": {"stage": 0}})
    inside = planned(from_count(3 * BILLION), roomy, config)
    assert inside is not None
    assert max(inside.tried["tensor"]) == 2
    across = planned(from_count(7 * BILLION), narrow, config)
    assert across is not None
    assert across.sizes["tensor"] == 8
    assert across.prediction.fits


def test_where_nothing_fits_the_fullest_rank_has_the_least() -> None:
    on = replace(gpus("A100-80G", 4), gpu_memory_bytes=1 << 30)
    found = planned(from_count(70 * BILLION), on, document(tensor="auto"))
    assert found is not None
    assert (found.sizes, found.prediction.fits) == ({"tensor": 4}, False)


@pytest.mark.parametrize(("host_gib", "size"), [(1024, 1), (60, 2), (32, 4), (1, 4)])
def test_where_no_speed_is_known_the_smallest_sizes_that_fit_are_taken(host_gib: int, size: int) -> None:
    """1B takes a host 90 GiB in four whole models, 49 in two, 29 in one."""
    on = replace(gpus("A100-80G", 4), gpu=None, gpu_memory_bytes=None, host_memory_bytes=host_gib << 30, given=Speeds())
    config = document(tensor="auto", more={"zero_optimization": {"stage": 0}})
    found = planned(from_count(BILLION), on, config)
    assert found is not None
    assert found.prediction.step.seconds is None
    assert (found.sizes["tensor"], found.prediction.fits) == (size, host_gib > 1)


def test_without_the_shape_of_its_layers_a_model_stays_whole() -> None:
    model = replace(from_count(BILLION), architecture=None)
    found = planned(model, gpus("A100-80G", 4), document(pipe="auto", tensor="auto"))
    assert found is not None
    assert (dict(found.sizes), dict(found.tried)) == ({"pipe": 1, "tensor": 1}, {"pipe": (1,), "tensor": (1,)})


def test_heads_that_do_not_divide_are_not_cut() -> None:
    shape = from_count(7 * BILLION).architecture
    assert shape is not None
    odd = from_architecture(replace(shape, heads=6, kv_heads=6, intermediate=12 * 1024), label="odd")
    found = planned(odd, gpus("A100-80G", 8), document(tensor="auto"))
    assert found is not None
    assert found.tried["tensor"] == (1, 2)


def test_a_network_of_unknown_speed_is_taken_for_a_slow_one() -> None:
    model, unknown = from_count(7 * BILLION), gpus("L40S-48G", 32)
    found = planned(model, unknown, document(pipe="auto", tensor="auto"))
    slow = replace(unknown, given=Speeds(network=CAUTIOUS["network"], ddr=CAUTIOUS["ddr"]))
    free = planned(model, replace(unknown, given=Speeds(network=1e18)), document(pipe="auto", tensor="auto"))
    expected = planned(model, slow, document(pipe="auto", tensor="auto"))
    assert found is not None
    assert expected is not None
    assert free is not None
    assert found.sizes == expected.sizes != free.sizes
    assert found.prediction.unknown_speeds == ("network",)


def test_speeds_without_that_of_computing_choose_nothing() -> None:
    """A network whose speed is known would prefer what sends the least, however long that computes."""
    model, bare = from_count(BILLION), replace(gpus("A100-80G", 16), gpu=None)
    found = planned(model, replace(bare, given=Speeds(network=1e9)), document(pipe="auto", tensor="auto"))
    assert found is not None
    assert found.sizes == {"pipe": 1, "tensor": 1}


def test_of_equals_fewer_stages_come_before_fewer_ranks_that_share_a_layer() -> None:
    """1B takes a host 90 GiB in whole models, 49 with layers on two ranks, 55 in two stages; no speed is known."""
    on = replace(gpus("A100-80G", 4), gpu=None, gpu_memory_bytes=None, host_memory_bytes=60 << 30, given=Speeds())
    more = {"zero_optimization": {"stage": 0}}
    found = planned(from_count(BILLION), on, document(pipe="auto", tensor="auto", more=more))
    assert found is not None
    fits = {
        (pipe, tensor): one.fits
        for pipe, tensor in ((1, 1), (1, 2), (2, 1))
        if (one := written(from_count(BILLION), on, {"pipe": pipe, "tensor": tensor}, more)) is not None
    }
    assert fits == {(1, 1): False, (1, 2): True, (2, 1): True}
    assert dict(found.sizes) == {"pipe": 1, "tensor": 2}


def test_stages_whose_chunks_would_have_no_block_are_passed_over() -> None:
    """Of five blocks two stages have two chunks each; of eight chunks three would have none, and two at most an end."""
    shape = from_count(BILLION).architecture
    assert shape is not None
    model, on = from_architecture(replace(shape, layers=5), label="five blocks"), gpus("A100-80G", 4)
    more = {"pipeline": {"stages": "auto", "schedule": "breadth_first", "virtual_stages": 2}}
    found = planned(model, on, document(more=more))
    assert found is not None
    assert found.sizes["pipe"] in (1, 2)
    assert found.tried["pipe"] == (1, 2, 4)


def test_sizes_that_leave_other_ranks_than_were_asked_for_are_passed_over() -> None:
    on, config = gpus("A100-80G", 8), document(tensor="auto")
    loaded = inspect(config).config
    assert loaded is not None

    def reread(sizes: Mapping[str, int]) -> Config | None:
        return inspect(config, world_size=on.ranks, planned=sizes).config

    def found(data_ranks: int) -> PlannedAxes | None:
        def settings(config: Config) -> RunSettings:
            given = settings_of(on)(config)
            if given.ranks_of("batch", on.ranks) != data_ranks:
                raise UsageError("other data ranks were asked for")
            return given

        return plan_open_axes(loaded, from_count(BILLION), on, reread=reread, settings_of=settings)

    sizes = {ranks: one.sizes["tensor"] for ranks in (1, 2, 4, 8) if (one := found(ranks)) is not None}
    assert sizes == {1: 8, 2: 4, 4: 2, 8: 1}
    assert found(3) is None


def test_an_mlp_that_does_not_divide_is_not_cut() -> None:
    shape = from_count(7 * BILLION).architecture
    assert shape is not None
    odd = from_architecture(replace(shape, intermediate=2 * 5503), label="odd")
    found = planned(odd, gpus("A100-80G", 8), document(tensor="auto"))
    assert found is not None
    assert found.tried["tensor"] == (1, 2)
