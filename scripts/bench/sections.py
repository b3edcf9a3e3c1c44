"""The sections of a benchmark one after the other: each is printed, and kept in a file, as soon as it is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from zero_peers.figures import Figures

Options = TypeVar("Options")


def measure(
    sections: Mapping[str, Callable[[Options], list[Figures]]],
    names: Sequence[str],
    options: Options,
    *,
    runs: int,
    json_file: Path | None,
) -> None:
    """Measures sections.

    Args:
        sections: functions by the name of the section; each one measures it and returns its tables.
        names: names of the sections to measure, in order.
        options: options that each section gets.
        runs: rounds of each, for the file.
        json_file: path of a file to which all tables are written too, as JSON; None for none.
    """
    tables: list[Figures] = []
    for name in names:
        for table in sections[name](options):
            tables.append(table)
            print(f"{table.markdown()}\n", flush=True)
        if json_file is not None:  # after each section, lest a run that is stopped has measured for nothing
            about = {"torch": torch.__version__, "cores": os.cpu_count(), "runs": runs, "only": list(names)}
            found = {"about": about, "tables": [table.as_json() for table in tables]}
            json_file.write_text(json.dumps(found, indent=1))
