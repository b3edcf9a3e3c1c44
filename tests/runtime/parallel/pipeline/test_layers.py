"""Layers that are not built yet say what they build, and build it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from dsrun.errors import ModelError
from dsrun.runtime.parallel.pipeline.layers import LayerSpec, TiedLayerSpec


def test_a_spec_builds_the_layer_with_its_arguments() -> None:
    spec = LayerSpec(nn.Linear, 2, out_features=3, bias=False)
    layer = spec.build()
    assert isinstance(layer, nn.Linear)
    assert (layer.weight.shape, layer.bias) == ((3, 2), None)
    assert spec.build() is not layer
    assert (spec.typename, spec.module_args, spec.module_kwargs) == (
        nn.Linear,
        (2,),
        {"out_features": 3, "bias": False},
    )
    assert repr(spec) == "Linear(2, out_features=3, bias=False)"


@pytest.mark.parametrize("name", ["weight", ["weight"]])
def test_the_names_of_tied_weights_are_a_list(name: Any) -> None:
    spec = TiedLayerSpec("embed", nn.Embedding, 5, 2, tied_weight_attr=name)
    assert (spec.key, spec.forward_fn, spec.tied_weight_attr) == ("embed", None, ["weight"])
    assert spec.build().weight.shape == (5, 2)


def test_what_is_no_class_of_modules_is_refused() -> None:
    not_a_class: Any = len
    with pytest.raises(RuntimeError, match="<built-in function len> is no class of"):
        LayerSpec(not_a_class)
    with pytest.raises(ModelError, match="TiedLayerSpec: <class 'int'>"):
        TiedLayerSpec("key", int)  # pyright: ignore[reportArgumentType]
