"""Fixtures that several files of the fault matrix share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults import Gate


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Where ranks wait until the test lets them through."""
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()
