"""Tokens are counted where the batch shows them, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.runtime.observe.steps.tokens import count_tokens, count_unpadded, named_input

TOKENS = torch.zeros(3, 5, dtype=torch.int64)
IMAGES = torch.zeros(3, 1, 4, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ((TOKENS,), {}, 15),
        ((TOKENS.int(), TOKENS), {}, 15),
        ((), {"input_ids": TOKENS, "labels": TOKENS}, 15),
        (({"input_ids": TOKENS},), {}, 15),
        (("mode", TOKENS), {}, 15),
        ((IMAGES, TOKENS), {}, 0),
        ((torch.zeros(3, dtype=torch.int64),), {}, 0),
        ((torch.zeros(3, 5),), {}, 0),
        ((), {}, 0),
    ],
)
def test_tokens_are_whole_numbers_in_two_dimensions(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
    assert count_tokens(args, kwargs) == tokens


@pytest.mark.parametrize("as_one", [True, False])
def test_padding_and_labels_are_found_in_a_batch_that_is_one_object_too(as_one: bool) -> None:
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones(3, 5).tril().long(), "labels": TOKENS}
    args, kwargs = ((batch,), {}) if as_one else ((), batch)
    assert int(count_unpadded(args, kwargs, 15)) == 1 + 2 + 3
    assert named_input("labels", args, kwargs) is TOKENS
    assert named_input("position_ids", args, kwargs) is None
