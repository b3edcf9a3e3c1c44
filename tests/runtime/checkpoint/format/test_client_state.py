"""What a script keeps comes back as it was; what cannot is named by its key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.client_state import put_together, take_apart, tensors_in


def test_json_values_and_tensors_come_back() -> None:
    state = {
        "epoch": 3,
        "best": float("inf"),
        "name": "run",
        "none": None,
        "list": [True, {"of": torch.arange(6).view(2, 3)}],
        "rng": torch.get_rng_state(),
        "scalar": torch.tensor(1.5),
        "transposed": torch.arange(6).view(2, 3).t(),
    }
    value, entries = take_apart(state, stores=True)
    names = tensors_in(value)
    assert sorted(names) == sorted(entry.name for entry in entries)
    assert "client_state['list'][1]['of']" in names
    back = put_together(value, {entry.name: entry.tensor.view(entry.shape) for entry in entries})
    assert back.keys() == state.keys()
    for key in ("epoch", "best", "name", "none"):
        assert back[key] == state[key]
    assert back["list"][0] is True
    assert torch.equal(back["list"][1]["of"], torch.arange(6).view(2, 3))
    assert torch.equal(back["transposed"], torch.arange(6).view(2, 3).t())
    assert back["scalar"].shape == ()


def test_only_the_rank_that_stores_has_entries() -> None:
    value, entries = take_apart({"x": torch.zeros(2)}, stores=False)
    assert entries == []
    assert tensors_in(value) == ["client_state['x']"]


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"x": {1}}, r"client_state\['x'\] is a set"),
        ({"x": [0, (1, 2)]}, r"client_state\['x'\]\[1\] is a tuple"),
        ({"x": {"y": np.zeros(2)}}, r"client_state\['x'\]\['y'\] is a ndarray"),
        ({"x": {1: 2}}, r"client_state\['x'\] has the key 1"),
        ({"x": {"__tensor__": 2}}, r"client_state\['x'\] has the key '__tensor__'"),
        ({3: 4}, "client_state has the key 3"),
        ({"f": print}, r"client_state\['f'\] is a builtin"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_key(state: Any, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        take_apart(state, stores=True)
