"""Answers the question `probe`: the report of this host, in its JSON form. See [Note: questions] in survey/server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..machine.read import probe, with_loaded


def answer(arguments: dict[str, Any], keep: ExitStack) -> Any:
    """Looks at this host.

    Args:
        arguments: `paths`, folders a job uses beside its working folder, and `deep`: load torch and ask it as well.
        keep: stack of things to keep until the survey is over; not used here.
    """
    return look(arguments["paths"], deep=arguments["deep"])


def look(paths: Sequence[str], *, deep: bool) -> dict[str, Any]:
    """Returns the report in its JSON form.

    Args:
        paths: folders a job uses beside its working folder.
        deep: load torch in a process of its own, and say what was loaded.
    """
    report = probe(paths=[Path(path) for path in paths])
    if deep:
        from ..machine.software.loaded_libraries import read_loaded

        report = with_loaded(report, read_loaded(sys.executable, os.environ))
    return report.to_json()
