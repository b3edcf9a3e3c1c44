"""What a script finds in `optimizer.state`: the states of shards, and no silence where it asks for a parameter's.

The states themselves stand in `placed.py`; whole ones, parameter by parameter, are read in `zero/access/fragments.py`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

from torch import Tensor, optim

from dsrun.errors import ModelError


class ShardStates(defaultdict[Any, Any]):
    """States by the shards that they belong to; torch's own dict would answer any other tensor with an empty one."""

    owner: weakref.ref[optim.Optimizer] | None = None

    def __missing__(self, key: Any) -> Any:
        """Makes the states of a shard that has none yet.

        Raises:
            ModelError: the key is a tensor that the optimizer does not step, as a parameter of the model.
        """
        optimizer = None if self.owner is None else self.owner()
        if optimizer is not None and isinstance(key, Tensor) and not _steps(optimizer, key):
            raise ModelError(
                f"optimizer.state: asked for a tensor of shape {tuple(key.shape)}, and the optimizer steps flat "
                "shards, each of many parameters",
                hint='dsrun.utils.safe_get_full_optimizer_state(param, "exp_avg") returns the state of a parameter, '
                "and safe_set_full_optimizer_state sets it",
            )
        return super().__missing__(key)


def answer_for_shards(optimizer: optim.Optimizer) -> None:
    """Has an optimizer of shards refuse to be asked for other tensors' states.

    Args:
        optimizer: optimizer whose leaves are shards; one that keeps states in a dict of its own is left alone.
    """
    if type(optimizer.state) is defaultdict:
        states = ShardStates(optimizer.state.default_factory, optimizer.state)
        states.owner = weakref.ref(optimizer)
        optimizer.state = states


def _steps(optimizer: optim.Optimizer, tensor: Tensor) -> bool:
    return any(param is tensor for group in optimizer.param_groups for param in group["params"])
