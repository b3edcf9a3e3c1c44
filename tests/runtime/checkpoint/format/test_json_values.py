"""What a schedule's state holds comes back from JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from dsrun.runtime.checkpoint.format.json_values import from_json, to_json


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "x",
        [1, [2.5]],
        {"a": {"b": [True]}},
        {30: 1, 60: {"x": {5: 6}}},
        {"__items__": {1: 2}},
        Counter({3: 1}),
    ],
)
def test_values_come_back(value: Any) -> None:
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


def test_tuples_become_lists() -> None:
    assert from_json(json.loads(json.dumps(to_json({"betas": (0.9, 0.95)})))) == {"betas": [0.9, 0.95]}
