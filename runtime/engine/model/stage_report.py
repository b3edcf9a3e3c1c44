"""What a run says at its start of its pipeline stages: a record, and a line. Prints nothing by itself."""

from __future__ import annotations

from typing import Any

from dsrun.config.config import Config
from dsrun.pipeline_schedules.formulas import live_micro_batches
from dsrun.pipeline_schedules.long_batches import step_seconds
from dsrun.pipeline_schedules.simulate import equal_costs

from ...parallel.pipeline.stages import Partition, Stages

#: Event of the stages of a run.
PIPELINE_EVENT = "pipeline"


def pipeline_record(stages: Stages, partition: Partition, settings: Config) -> dict[str, Any]:
    """Returns the fields of the record: stages, layers and cost of each chunk, schedule, bubble, live micro batches.

    The bubble is the share of a step that ranks wait if all chunks take the same time.

    Args:
        stages: chunks of the model.
        partition: layers of each chunk.
        settings: the config.
    """
    assert settings.batch is not None, "the config was loaded with a world size"
    ranks, micros = max(stages.rank_of) + 1, settings.batch.accumulation_steps
    name, virtual = settings.pipeline.schedule_name, len(stages.rank_of) // ranks
    chunks = len(stages.rank_of)
    # A chunk computes one unit of time for a micro batch.
    costs = equal_costs(chunks, forward=1 / 3, input_grads=1 / 3, weight_grads=1 / 3)
    bubble = 1 - micros * virtual / step_seconds(name, costs, ranks=ranks, micros=micros, virtual=virtual)
    # Layers that are shared out by number, class or bounds were not weighed.
    of_chunk = [partition.layers_of(chunk) if partition.costs else range(0) for chunk in range(chunks)]
    sums = [sum(partition.costs[n] for n in layers) for layers in of_chunk]
    total = sum(sums)
    return {
        "stages": ranks,
        "schedule": name,
        "virtual_stages": virtual,
        "micro_batches": micros,
        "stage_of_chunk": list(stages.rank_of),
        "layers": [[partition.bounds[chunk], partition.bounds[chunk + 1]] for chunk in range(chunks)],
        "cost_shares": [round(one / total, 4) for one in sums] if total else [],
        "bubble": round(bubble, 4),
        "live_micro_batches": live_micro_batches(name, ranks=ranks, micros=micros, virtual=virtual),
    }


def pipeline_line(record: dict[str, Any]) -> str:
    """Returns the record as a line."""
    layers = " | ".join(
        f"{first} to {end - 1}" if end - first > 1 else str(first) if end > first else "none"
        for first, end in record["layers"]
    )
    chunks = f", {record['virtual_stages']} chunks a stage" if record["virtual_stages"] > 1 else ""
    return (
        f"dsrun: pipeline of {record['stages']} stages{chunks}: layers {layers}; {record['schedule']} over "
        f"{record['micro_batches']} micro batches, bubble {100 * record['bubble']:.1f} %"
    )
