"""Tables of other settings: every stage and offload, and every layout and recomputation of one micro batch."""

from __future__ import annotations

from dataclasses import replace

from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.changes import (
    OFFLOADS,
    RECOMPUTATIONS,
    stage_in,
    stages_of_zero,
    takes_offload,
    with_offload,
    with_recomputation,
    with_samples,
)
from dsrun.estimate.search.layouts import layouts

_Order = tuple[bool, float, int]


def what_if(model: ModelSize, settings: RunSettings, machine: Machine) -> list[Prediction]:
    """Predicts every stage with every offload; parameters are offloaded at stage 3 only, nothing at stage 0."""
    return [
        predict(model, with_offload(changed, *tiers), machine)
        for stage in stages_of_zero(settings)
        for changed in (replace(settings, stage=stage),)
        for tiers in OFFLOADS
        if takes_offload(changed, *tiers)
    ]


def what_if_axes(model: ModelSize, settings: RunSettings, machine: Machine) -> list[list[Prediction]]:
    """Predicts every layout with each recomputation, for the stage, micro batch and samples of the settings.

    Pipelines run under the schedule of the settings. Paths of unknown speed are taken for cautious ones in sorting.

    Args:
        model: the model.
        settings: settings that are asked about.
        machine: machine to train on.

    Returns:
        predictions of one layout together; what fits and is fastest first, among layouts and within each.
    """
    samples = settings.micro_batch * settings.accumulation_steps * settings.ranks_of("batch", machine.ranks)
    cautious = machine.with_cautious_speeds()
    found: list[list[tuple[_Order, Prediction]]] = []
    for layout in layouts(model, settings, machine, free=("tensor", "pipe")):
        cut = with_samples(layout, samples, settings.micro_batch, machine)
        if cut is None:
            continue
        cut = replace(cut, stage=stage_in(cut, cut.stage))
        if not takes_offload(cut, cut.offload_optimizer, cut.offload_param):
            continue  # parameters of a pipeline leave the device only where chunks take turns
        rows: list[tuple[_Order, Prediction]] = []
        for one in RECOMPUTATIONS:
            row = predict(model, with_recomputation(cut, one), machine, exact=False)
            priced = row if cautious is machine else predict(model, row.settings, cautious, exact=False)
            rows.append((_order(priced), row))
        found.append(sorted(rows, key=_first))
    return [[row for _, row in rows] for rows in sorted(found, key=lambda rows: rows[0][0])]


def _first(row: tuple[_Order, Prediction]) -> _Order:
    return row[0]


def _order(prediction: Prediction) -> _Order:
    seconds = prediction.step.seconds
    # Of what does not fit, that which lacks the least.
    needed = 0 if prediction.fits is not False else prediction.tiers[0].total_bytes
    return prediction.fits is False, needed or (0.0 if seconds is None else seconds), prediction.traffic.network_bytes
