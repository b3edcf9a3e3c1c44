"""Which argument of a block is its hidden states, and arguments with another one in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.runtime.parallel.hidden_states import hidden_of, value_at, with_value

TOKENS, FLOATS, OTHERS = torch.ones(2, dtype=torch.int64), torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize(
    ("args", "kwargs", "place"),
    [
        ((FLOATS, OTHERS), {}, 0),
        ((TOKENS, None, FLOATS), {"hidden_states": OTHERS}, 2),
        ((TOKENS,), {"mask": OTHERS, "hidden_states": FLOATS}, "hidden_states"),
        ((), {"position": TOKENS, "x": FLOATS, "mask": OTHERS}, "x"),
        ((TOKENS,), {"hidden_states": TOKENS, "x": FLOATS}, "x"),
    ],
)
def test_the_first_floating_tensor_is_taken_and_replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str
) -> None:
    assert hidden_of(args, kwargs) == place
    assert value_at(place, args, kwargs) is FLOATS
    before = dict(kwargs)
    changed, named = with_value(place, OTHERS, args, kwargs)
    assert value_at(place, changed, named) is OTHERS
    assert (len(changed), list(named)) == (len(args), list(kwargs))
    assert all(kwargs[name] is value for name, value in before.items()), "what was given stays as it is"


def test_without_a_floating_tensor_there_are_none() -> None:
    assert hidden_of((TOKENS, 1.0), {"hidden_states": [FLOATS]}) is None
