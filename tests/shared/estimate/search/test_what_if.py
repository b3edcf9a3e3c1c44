"""Tables of other settings."""

from __future__ import annotations

from dataclasses import replace

from dsrun.config.findings import Code
from dsrun.config.load import inspect
from dsrun.estimate.model.units import from_count
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.changes import RECOMPUTATIONS, recomputation_of
from dsrun.estimate.search.what_if import what_if, what_if_axes
from support.planned_machines import gpus

GIB = 1 << 30
MODEL = from_count(7 * 10**9)
BF16 = RunSettings(compute_bytes=2, sequence=2048, micro_batch=8)


def test_what_if_covers_every_stage_and_offload_and_marks_what_cannot_run() -> None:
    found = what_if(MODEL, BF16, gpus("H100-80G"))
    keys = [(p.settings.stage, p.settings.offload_optimizer, p.settings.offload_param) for p in found]
    assert len(keys) == len(set(keys)) == 12
    for prediction in found:
        given = prediction.settings
        offload = {"offload_optimizer": given.offload_optimizer, "offload_param": given.offload_param}
        section = {"stage": given.stage, **{key: {"device": tier} for key, tier in offload.items()}}
        codes = {finding.code for finding in inspect({"zero_optimization": section}).findings}
        assert given.can_run == (Code.PLANNED not in codes), f"{section}: as the config says"


def test_each_stage_needs_less_than_the_one_before() -> None:
    found = [p for p in what_if(MODEL, BF16, gpus("H100-80G")) if p.settings.offload_optimizer == "none"]
    totals = [p.tier("GPU").total_bytes for p in found]
    assert totals == sorted(totals, reverse=True)


def test_each_layout_is_told_with_each_recomputation_and_the_samples_of_a_step_stay() -> None:
    asked = replace(BF16, stage=1, micro_batch=1, accumulation_steps=16)
    found = what_if_axes(MODEL, asked, gpus("A100-80G"))
    sizes = {(rows[0].settings.tensor_parallel, rows[0].settings.stages) for rows in found}
    assert sizes == {(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8}
    for rows in found:
        assert {recomputation_of(row.settings) for row in rows} == {*RECOMPUTATIONS}
        for row in rows:
            given = row.settings
            data = 8 // (given.tensor_parallel * given.stages)
            assert given.micro_batch * given.accumulation_steps * data == 128
            assert given.sequence_slices == (given.tensor_parallel > 1)
        fitting = [row for row in rows if row.fits]
        assert rows[: len(fitting)] == fitting, "what fits comes first"
    firsts = [rows[0] for rows in found if rows[0].fits]
    assert [row.step.seconds for row in firsts] == sorted(row.step.seconds or 0 for row in firsts)


def test_norms_work_on_slices_of_a_sequence_that_divides_alone() -> None:
    asked = replace(BF16, sequence=2050, stage=1, micro_batch=1, accumulation_steps=16)
    found = what_if_axes(MODEL, asked, gpus("A100-80G"))
    slices = {rows[0].settings.tensor_parallel: rows[0].settings.sequence_slices for rows in found}
    assert slices == {1: False, 2: True, 4: False, 8: False}
