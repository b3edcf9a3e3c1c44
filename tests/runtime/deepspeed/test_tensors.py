"""Small functions of DeepSpeed's do what they do there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.runtime.deepspeed.tensors import (
    call_to_str,
    copy_to_device,
    ensure_directory_exists,
    get_only_unique_item,
    get_tensor_bytes,
    move_to_device,
    noop_context,
    noop_decorator,
    set_random_seed,
)


def test_things_in_containers_are_moved() -> None:
    param = nn.Parameter(torch.ones(2))
    given: dict[str, Any] = {"a": [param, (torch.zeros(1), nn.Linear(1, 1))], "b": {}}
    moved = move_to_device(given, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1].weight.is_meta
    assert (type(moved["a"][1]), moved["b"]) == (tuple, {})
    assert not param.is_meta


def test_what_the_criterion_says_is_moved_in_place() -> None:
    kept = torch.ones(2)
    (moved,) = move_to_device([kept], "cpu", lambda item: isinstance(item, Tensor))
    assert moved is kept
    assert moved.tolist() == [1.0, 1.0]


def test_what_the_criterion_says_is_copied_and_the_rest_stays() -> None:
    tensor = torch.ones(2)
    copied = copy_to_device({"a": (tensor, "word"), "b": 3}, "meta", torch.is_tensor)
    assert copied["a"][0].is_meta
    assert (copied["a"][1], copied["b"]) == ("word", 3)
    assert not tensor.is_meta


def test_what_is_on_the_device_is_not_copied_again_as_in_deepspeed() -> None:
    tensor = torch.ones(2)
    given = [tensor]
    copied = copy_to_device(given, "cpu", torch.is_tensor)
    assert copied is not given
    assert copied[0] is tensor


def test_bytes_of_tensors_in_containers() -> None:
    given = [torch.zeros(3), {"a": (torch.zeros(2, dtype=torch.bfloat16), "word")}, 5]
    assert get_tensor_bytes(given) == 12 + 4


def test_all_generators_are_seeded() -> None:
    numpy = pytest.importorskip("numpy")
    drawn: list[tuple[float, float, float]] = []
    for _ in range(2):
        set_random_seed(2**40 + 3)
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_a_files_folder_is_made(tmp_path: Path) -> None:
    ensure_directory_exists(str(tmp_path / "a" / "b" / "file"))
    ensure_directory_exists(str(tmp_path / "a" / "b" / "file"))
    ensure_directory_exists("file")
    assert (tmp_path / "a" / "b").is_dir()


def test_calls_are_text() -> None:
    assert call_to_str("load") == "load()"
    assert call_to_str("load", 1, "x", key=[2]) == "load(1, 'x', key=[2])"


def test_the_only_item_is_returned() -> None:
    assert get_only_unique_item([3, 3, 3]) == 3
    for items in ([], [1, 2]):
        with pytest.raises(ModelError, match="different items") as raised:
            get_only_unique_item(items)
        assert isinstance(raised.value, RuntimeError)


def test_nothing_is_done_by_what_says_so() -> None:
    assert noop_decorator(len) is len
    with noop_context():
        pass
