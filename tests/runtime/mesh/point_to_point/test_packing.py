"""A text says all of the tensors but their values, and what cannot be sent is refused by name."""

from __future__ import annotations

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.mesh.point_to_point.packing import (
    ALIGNMENT_BYTES,
    fill,
    packing_from,
    packing_of,
    places_in,
    unpack,
)
from support.link_rounds import assert_equal, kinds

CPU = torch.device("cpu")


def test_tensors_come_out_of_the_text_and_the_bytes_as_they_went_in() -> None:
    packing = packing_of(kinds(), device_type="cpu", label="")
    assert all(form.offset % ALIGNMENT_BYTES == 0 for form in packing.forms)
    storage = torch.empty(packing.nbytes, dtype=torch.uint8)
    fill(places_in(packing, storage.untyped_storage(), device=CPU), kinds())
    assert packing_from(packing.text) == packing
    assert_equal(unpack(packing_from(packing.text), storage.untyped_storage(), device=CPU), kinds())


def test_no_tensors_take_no_bytes() -> None:
    packing = packing_of([], device_type="cpu", label="")
    assert (packing.nbytes, packing.forms, packing.text) == (0, (), b"")
    assert packing_from(b"") == packing


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"^tensor 1 of the message of hidden states is of layout torch\.sparse_coo"):
        packing_of([torch.ones(2), torch.eye(3).to_sparse()], device_type="cpu", label="hidden states")


def test_a_tensor_on_another_device_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"^tensor 0 of the message of hidden states lies on meta, where messages"):
        packing_of([torch.ones(2, device="meta")], device_type="cpu", label="hidden states")
