"""Tests marked `cuda` are skipped, by name, where torch sees no GPU; `bash scripts/gpu_check` runs them on one."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda") is not None]
    if marked and not _sees_a_gpu():
        without = pytest.mark.skip(reason="needs a CUDA GPU: `bash scripts/gpu_check --only proofs` runs it on one")
        for item in marked:
            item.add_marker(without)


def _sees_a_gpu() -> bool:
    import torch  # most tests of the launcher do without it

    return torch.cuda.is_available()
