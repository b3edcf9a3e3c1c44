"""Attributes are got and set by paths with dots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsrun.as_deepspeed.attribute_paths import recursive_getattr, recursive_setattr


def test_a_path_is_followed_and_its_end_is_set() -> None:
    model = SimpleNamespace(block=SimpleNamespace(layer=3))
    assert recursive_getattr(model, "block.layer") == 3
    recursive_setattr(model, "block.layer", 4)
    recursive_setattr(model, "head", 5)
    assert (model.block.layer, model.head) == (4, 5)
    with pytest.raises(AttributeError, match="missing"):
        recursive_setattr(model, "missing.layer", 1)
