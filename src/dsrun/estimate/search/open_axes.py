"""Sizes for the axes that a config leaves open: the fastest that fits, of all that the config's own rules take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dsrun.config.axes import open_axes, sizes_of
from dsrun.config.config import Config
from dsrun.errors import InputError, LayoutError
from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.changes import rounded
from dsrun.estimate.search.layouts import has_blocks, stage_counts, tensor_sizes


@dataclass(frozen=True, slots=True)
class PlannedAxes:
    """Sizes of the axes that a config leaves open.

    Attributes:
        sizes: ranks along each of these axes, by its name.
        prediction: prediction for the config with these sizes.
        tried: by axis, the sizes that were looked at, ascending.
    """

    sizes: Mapping[str, int]
    prediction: Prediction
    tried: Mapping[str, tuple[int, ...]]


def plan_open_axes(
    config: Config,
    model: ModelSize,
    machine: Machine,
    *,
    reread: Callable[[Mapping[str, int]], Config | None],
    settings_of: Callable[[Config], RunSettings],
) -> PlannedAxes | None:
    """Returns the sizes with the most samples a second of all that fit; None where the config takes no sizes at all.

    Batch sizes count as the config has them: where it says the samples of a rank, more ranks for a model are fewer
    samples an update. Of equals, and of all that fit where the speed of computing is not known, fewer stages, then
    fewer ranks that share a layer; these are on one host unless nothing else fits. Other paths of unknown speed are
    taken for cautious ones in choosing, and told without. Where nothing fits, the sizes whose fullest rank needs the
    least.

    Args:
        config: the config.
        model: the model; without the shape of its layers 1 is the only size that is looked at.
        machine: machine to train on.
        reread: function that returns the config with these sizes, by name of the axis; None where it takes them not.
        settings_of: function that returns the settings of such a config; it may raise InputError where the ranks do
            not divide, or are not divided as was asked for.
    """
    best: tuple[tuple[float, ...], Mapping[str, int], Prediction] | None = None
    cautious, is_timed = machine.with_cautious_speeds(), machine.speeds(half=True).flops is not None
    tried: dict[str, set[int]] = {}
    for over_hosts in (False, True) if machine.hosts > 1 else (False,):
        for sizes in _choices(config, model, machine, over_hosts=over_hosts):
            for axis, size in sizes.items():
                tried.setdefault(axis, set()).add(size)
            prediction = _predicted(sizes, model, cautious, reread, settings_of)
            if prediction is None:
                continue
            order = _order(prediction, sizes, is_timed=is_timed)
            if best is None or order < best[0]:
                best = order, sizes, prediction
        if best is not None and best[2].fits is not False:
            break
    if best is None:
        return None
    told = predict(model, best[2].settings, machine)
    return PlannedAxes(best[1], told, {axis: tuple(sorted(sizes)) for axis, sizes in tried.items()})


def _choices(config: Config, model: ModelSize, machine: Machine, *, over_hosts: bool) -> Iterator[dict[str, int]]:
    """Yields sizes of the open axes."""
    asked, names = RunSettings(axis_sizes=sizes_of(config)), open_axes(config)
    sizes = tensor_sizes(model, asked, machine, over_hosts=over_hosts)
    for stages in stage_counts(model, asked, machine) if "pipe" in names else [asked.stages]:
        for tensor in sizes if "tensor" in names else [asked.tensor_parallel]:
            yield {axis: size for axis, size in (("pipe", stages), ("tensor", tensor)) if axis in names}


def _predicted(
    sizes: Mapping[str, int],
    model: ModelSize,
    machine: Machine,
    reread: Callable[[Mapping[str, int]], Config | None],
    settings_of: Callable[[Config], RunSettings],
) -> Prediction | None:
    config = reread(sizes)
    if config is None:
        return None
    try:
        settings = settings_of(config)
        return predict(model, settings, machine) if has_blocks(model, settings) else None
    except (InputError, LayoutError):  # ranks, batch, heads or the schedule do not go with these sizes
        return None


def _order(prediction: Prediction, sizes: Mapping[str, int], *, is_timed: bool) -> tuple[float, ...]:
    settings, seconds = prediction.settings, prediction.step.seconds if is_timed else None
    ranks = settings.ranks_of("batch", prediction.machine.ranks)
    samples = settings.micro_batch * settings.accumulation_steps * ranks
    missing = 0 if prediction.fits is not False else prediction.tiers[0].total_bytes
    return missing, rounded((seconds or 0.0) / samples), sizes.get("pipe", 1), sizes.get("tensor", 1)
