"""Environments that launchers and schedulers make: tests/fixtures/environments/*.env, each with its origin on top."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent.parent / "fixtures" / "environments"
NAMES = sorted(path.stem for path in FOLDER.glob("*.env"))


def environment_of(name: str) -> dict[str, str]:
    """Returns the variables of one of `NAMES`."""
    lines = (FOLDER / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))
