"""What tests of tensor parallelism share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
