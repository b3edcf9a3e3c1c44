"""What docs/guides/probe.md and docs/internals/probe.md show is what the probe says of the recorded machines."""

from __future__ import annotations

import re
from pathlib import Path

from dsrun.launcher.probe.topology_text import topology_lines
from support.machines import recorded_machine

DOCS = Path(__file__).parents[3] / "docs"
GUIDE, INTERNALS = ((DOCS / folder / "probe.md").read_text() for folder in ("guides", "internals"))


def blocks(page: str) -> list[str]:
    return re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def block(page: str, beginning: str) -> list[str]:
    (found,) = (text.splitlines() for text in blocks(page) if text.lstrip().startswith(beginning))
    return found


def test_the_matrix_is_that_of_the_workstation(tmp_path: Path) -> None:
    assert topology_lines(recorded_machine("workstation", tmp_path).report().topology) == block(INTERNALS, "GPU0")


def test_the_verdicts_are_those_of_the_server(tmp_path: Path) -> None:
    verdicts = recorded_machine("l40s_pcie", tmp_path).report().verdicts
    lines = [f"{verdict.level:<6} {verdict.text}" for verdict in verdicts if verdict.path != "versions.torch"]
    # Of this test's own machine: its working folder and /dev/shm.
    mine = ("storage.paths", "memory.shm")
    spoken_of = [verdict.text for verdict in verdicts if verdict.path.startswith(mine)]
    assert [line for line in lines if line[7:] not in spoken_of] == block(GUIDE, "red")


def test_every_key_of_the_json_form_is_explained(tmp_path: Path) -> None:
    rows = [line.split("|")[1] for line in INTERNALS.partition("## JSON")[2].splitlines() if line.startswith("| `")]
    explained = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert explained == set(recorded_machine("workstation", tmp_path).report().to_json()) - {"schema_version"}
