"""What a script keeps comes back as it was; what cannot is named by its key."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

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


def test_tuples_arrays_and_keys_that_are_no_text_come_back_as_they_were() -> None:
    state = {
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "arrays": [np.zeros((2, 0)), np.arange(6, dtype=np.uint32).reshape(2, 3).T, np.array(True), np.array(1.5)],
        "scalars": (np.float32(0.1), np.int64(7), np.bool_(False)),
        "nested": {0: (1, (2, [3])), None: {1.5: ()}, "text": {}},
        "empty": ((), {}, []),
    }
    value, entries = take_apart(state, stores=True)
    value = json.loads(json.dumps(value))
    assert sorted(tensors_in(value)) == sorted(entry.name for entry in entries)
    back = put_together(value, {entry.name: entry.tensor.view(entry.shape) for entry in entries})
    assert back.keys() == state.keys()
    for name in ("python", "nested", "empty"):
        assert back[name] == state[name]
    for array, expected in zip([*back["arrays"], back["numpy"][1]], [*state["arrays"], state["numpy"][1]], strict=True):
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(array, expected)
    assert [type(one) for one in back["scalars"]] == [np.float32, np.int64, np.bool_]
    assert back["scalars"] == state["scalars"]
    np.random.set_state(back["numpy"])
    random.setstate(back["python"])


class _Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"x": {1}}, r"client_state\['x'\] is a set"),
        ({"x": [0, _Point(2)]}, r"client_state\['x'\]\[1\] is a _Point"),
        ({"x": {"y": np.array(["a"])}}, r"client_state\['x'\]\['y'\] is an array of <U1"),
        ({"x": {"y": np.array([{}])}}, r"client_state\['x'\]\['y'\] is an array of object"),
        ({"x": {(1, 2): 2}}, r"client_state\['x'\] has the key \(1, 2\)"),
        ({"x": {"__tuple__": 2}}, r"client_state\['x'\] has the key '__tuple__'"),
        ({"x": {"__tensor__": 2}}, r"client_state\['x'\] has the key '__tensor__'"),
        ({b"k": 4}, "client_state has the key b'k'"),
        ({"f": print}, r"client_state\['f'\] is a builtin"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_key(state: Any, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        take_apart(state, stores=True)
