"""Pipeline stages of a prediction, for people and as JSON. Computes nothing but percentages."""

from __future__ import annotations

import textwrap
from typing import Any

from dsrun.estimate.model.stages import head_in_blocks
from dsrun.estimate.prediction import Prediction
from dsrun.estimate.time.pipeline import PipelineEstimate, StageEstimate
from dsrun.units import format_bytes, format_count

_WIDTH = 80


def describe_pipeline(prediction: Prediction) -> list[str]:
    """Returns a table of the stages and what ranks wait; nothing for one stage."""
    pipeline = prediction.pipeline
    if pipeline is None:
        return []
    header = f"{'stage':<7}{'blocks':<24}{'cost':>7}{'params':>9}{'live':>7}{'sends':>11}{'memory':>11}"
    lines = [header]
    for number, stage in enumerate(pipeline.stages):
        mark = "  <-" if number == prediction.fullest else ""
        lines.append(
            f"{number:<7}{_blocks(stage):<24}{stage.cost:>7.1%}{format_count(stage.parameters):>9}{stage.live:>7.3g}"
            f"{format_bytes(stage.sent_bytes):>11}{format_bytes(prediction.stage_bytes[number]):>11}{mark}"
        )
    chunks = f" with {pipeline.chunks_per_rank} chunks a rank" if pipeline.chunks_per_rank > 1 else ""
    alike = "" if pipeline.bubble_formula is None else f"; {pipeline.bubble_formula:.1%} if all chunks took as long"
    micros = f"{pipeline.micros} micro batch{'es' if pipeline.micros > 1 else ''}"
    texts = [
        f"{pipeline.schedule}{chunks}, {micros}: ranks wait {pipeline.bubble:.1%} of a step"
        f"{alike} (<- the fullest stage, whose memory follows)",
        _balance_text(prediction, pipeline),
    ]
    efficiency = pipeline.efficiency_interleaved
    if efficiency is not None:
        texts.append(_efficiency_text(pipeline, efficiency))
    return [*lines, *(line for text in texts for line in textwrap.wrap(text, _WIDTH))]


def _balance_text(prediction: Prediction, pipeline: PipelineEstimate) -> str:
    shape, settings = prediction.model.architecture, prediction.settings
    said = f"the costliest stage computes {pipeline.imbalance:.1%} more than the mean"
    if shape is None:
        return said
    return f"{said}; the head takes as long as {head_in_blocks(shape, settings.sequence):.2g} blocks"


def _blocks(stage: StageEstimate) -> str:
    parts = ["embedding"] if stage.has_embedding else []
    number, total = len(stage.blocks), sum(stage.blocks)
    if number == 1:
        parts.append(f"{total}")
    else:
        parts.append(f"{number} x {stage.blocks[0]}" if len(set(stage.blocks)) == 1 else f"{total} in {number}")
    parts += ["head"] if stage.has_head else []
    return ", ".join(parts)


def _efficiency_text(pipeline: PipelineEstimate, efficiency: float) -> str:
    stages, micros = len(pipeline.stages), pipeline.micros
    formula = f"M*P/(M*P+2(P-1)) with M = {micros} and P = {stages}"
    if stages == 2:
        return f"{formula} is {efficiency:.1%}: the efficiency of 1f1b, which with two stages is interleaved with v = 1"
    return (
        f"{formula} is {efficiency:.1%}: the efficiency of interleaved 1F1B with v = P/2 = {stages // 2} chunks a rank"
    )


def pipeline_json(prediction: Prediction) -> dict[str, Any] | None:
    """Returns the stages as plain JSON values; None for one stage."""
    pipeline = prediction.pipeline
    if pipeline is None:
        return None
    return {
        "stages": [
            {
                "blocks": list(stage.blocks),
                "embedding": stage.has_embedding,
                "head": stage.has_head,
                "cost": stage.cost,
                "parameters": stage.parameters,
                "live_micro_batches": stage.live,
                "sent_bytes": stage.sent_bytes,
                "bytes": prediction.stage_bytes[number],
            }
            for number, stage in enumerate(pipeline.stages)
        ],
        "fullest": prediction.fullest,
        "schedule": pipeline.schedule,
        "chunks_per_rank": pipeline.chunks_per_rank,
        "micro_batches": pipeline.micros,
        "bubble_formula": pipeline.bubble_formula,
        "bubble": pipeline.bubble,
        "imbalance": pipeline.imbalance,
        "sent_bytes": pipeline.sent_bytes,
        "efficiency_interleaved": pipeline.efficiency_interleaved,
    }
