"""The product of a linear layer as a thing of its own, in layers whose forward does more, as to sum over ranks.

Such a layer asks `product_of` each time. Who splits the backwards of linear layers puts a product of its own there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_NAME = "_dsrun_product"
#: What gives a layer's product with an input, with its bias or without: `product(x, has_bias=True)`.
LinearProduct = Callable[..., Tensor]


class AsksForProduct:
    """Stands before the class of a linear layer whose forward asks `product_of`."""


def asks_for_product(module: nn.Module) -> bool:
    """Whether a layer's forward does more than its product, and asks for that."""
    return isinstance(module, AsksForProduct)


def product_of(module: Any) -> LinearProduct | None:
    """Returns what was put in place of a layer's product; None where nothing was."""
    return vars(module).get(_NAME)


def put_product(module: nn.Module, product: LinearProduct) -> None:
    """Puts a product in place of a layer's own.

    Args:
        module: layer of a class that asks for it.
        product: product to use; it has `plain_product`'s arguments but the layer.
    """
    assert asks_for_product(module), "its forward would not ask"
    module.__dict__[_NAME] = product


def take_away_product(module: nn.Module) -> None:
    """Gives a layer its own product back."""
    module.__dict__.pop(_NAME, None)


def plain_product(module: Any, x: Tensor, *, has_bias: bool = True) -> Tensor:
    """Returns the product of a layer as torch's Linear makes it.

    Args:
        module: layer with a weight, [out, in], and a bias or None.
        x: inputs, [..., in].
        has_bias: whether its bias is added.
    """
    return F.linear(x, module.weight, module.bias if has_bias else None)
