"""What differs between jobs: keys of their configs, and what else they depend on. Rows of texts; draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..jobs.description import hardware_rows, software_rows
from ..jobs.text import command_text
from .job_source import JobSource

#: Stands where a job does not have a value.
_NONE = "–"


def config_rows(sources: Sequence[JobSource]) -> list[list[str]]:
    """Returns a row for each key whose value is not the same in all configs: its path, and a value for each job.

    Args:
        sources: Facts of each job.
    """
    values = [
        {each.path: f"{each.text} (default)" if each.is_default else each.text for each in source.config}
        for source in sources
    ]
    plain = [{each.path: each.text for each in source.config} for source in sources]
    paths = list(dict.fromkeys(path for each in plain for path in each))
    return [
        [path, *(each.get(path, _NONE) for each in values)]
        for path in sorted(paths)
        if len({each.get(path) for each in plain}) > 1
    ]


def fact_rows(sources: Sequence[JobSource]) -> list[list[str]]:
    """Returns a row for each thing beside the config that is not the same for all jobs.

    Args:
        sources: Facts of each job.
    """
    facts = [_facts(source) for source in sources]
    labels = list(dict.fromkeys(label for each in facts for label in each))
    return [
        [label, *(each.get(label, _NONE) for each in facts)]
        for label in labels
        if len({each.get(label) for each in facts}) > 1
    ]


def _facts(source: JobSource) -> Mapping[str, str]:
    record = source.job.record
    probe: dict[str, Any] = source.facts.get("probe") or {}
    facts = {
        "command": command_text(source.job),
        "folder": record.cwd,
        "config": record.config or _NONE,
        "ranks": str(record.ranks),
        "hosts": ", ".join(record.hosts),
    }
    variables: dict[str, str] = record.plan.get("env") or {}
    facts |= {f"variable {name}": value for name, value in variables.items()}
    rows: dict[str, list[str]] = {}
    for label, text in (*hardware_rows(probe), *software_rows(probe, source.facts)):
        rows.setdefault(label, []).append(text)
    return facts | {label: ", ".join(texts) for label, texts in rows.items()}
