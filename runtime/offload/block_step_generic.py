"""Any elementwise optimizer block by block, by its own code: one of torch's or the script's.

A twin of the optimizer, which has its class and attributes but a leaf and state of its own, steps one block after the
other. An update that reads its own element alone gives each element what it gives it in the whole.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from dsrun.errors import ModelError

from ..optim.structured import StructuredOptimizer
from .block_cut import Block, BlockCutter
from .block_work import RangeWork

#: A script's hooks run once a step, not once a block, and those of a schedule lead to the optimizer itself.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OwnCodeBlocks:
    """Steps ranges by an optimizer's own `step`.

    Args:
        optimizer: whose class and attributes count.
        cutter: cuts ranges into blocks.

    Raises:
        ModelError: it needs to know which tensors a range holds.
    """

    def __init__(self, optimizer: optim.Optimizer, cutter: BlockCutter) -> None:
        if isinstance(optimizer, StructuredOptimizer):
            raise ModelError(
                f"optimizer: {type(optimizer).__name__} needs whole tensors, and a block is a part of one",
                hint="choose an elementwise optimizer (AdamW, Lion, SGD), or leave it on the device",
            )
        self._optimizer = optimizer
        self._cutter = cutter

    def step(self, work: RangeWork) -> None:
        """Updates one range; see `BlockStep`.

        Raises:
            ModelError: the optimizer's own code gives two blocks different counts, so it is not elementwise.
        """
        before = {name: _copied(value) for name, value in work.scalars.items()}
        known = list(work.states)
        is_first = True
        for block in self._cutter.blocks(work):
            state, changed = self._step_block(block, {**before, **{name: block.states[name] for name in known}}, work)
            scalars = self._keep(state, block, work)
            if is_first:
                work.scalars.update(scalars)
                work.changed.update(changed)
                is_first = False
            elif not (_same(scalars, work.scalars) and _same(changed, work.changed)):
                raise _not_elementwise(self._optimizer, "keeps a different count for each part of a tensor")

    def _step_block(
        self, block: Block, state: dict[str, Any], work: RangeWork
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the block's state after the step, and the options that the step has set anew."""
        leaf = nn.Parameter(block.master)
        leaf.grad = block.grad
        options = {key: value for key, value in work.options.items() if key not in ("params", "param_names")}
        scalars = {name: _copied(value) for name, value in state.items() if name not in block.states}
        twin = _twin(self._optimizer, leaf, options, {**state, **scalars})
        attributes = dict(vars(twin))
        type(twin).step(cast(Any, twin))
        moved = [name for name, value in vars(twin).items() if attributes.get(name) is not value]
        if moved and not type(twin).__module__.startswith("torch."):
            raise _not_elementwise(self._optimizer, f"keeps `{moved[0]}` for all parameters together")
        group = twin.param_groups[0]
        changed = {k: v for k, v in group.items() if k != "params" and (k not in options or options[k] is not v)}
        return twin.state[leaf], changed

    def _keep(self, state: dict[str, Any], block: Block, work: RangeWork) -> dict[str, Any]:
        """Writes states that do not lie in their place yet to where they belong; returns the scalars."""
        scalars: dict[str, Any] = {}
        numel = block.master.numel()
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != block.master.shape:
                scalars[name] = value
                continue
            if name not in work.states:
                work.add_state(name, value.dtype)
            part = work.states[name][block.start : block.start + numel]
            if part.data_ptr() != value.data_ptr():
                part.copy_(value)
        return scalars


def _twin(
    optimizer: optim.Optimizer, leaf: nn.Parameter, options: dict[str, Any], state: dict[str, Any]
) -> optim.Optimizer:
    """Returns an optimizer of the same class and attributes that has one leaf, and no hooks."""
    twin = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(twin).update(attributes, **{name: OrderedDict() for name in _HOOKS})
    twin.state = defaultdict(dict, {leaf: state} if state else {})
    twin.param_groups = [{"params": [leaf], **options}]
    return twin


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(ones: dict[str, Any], others: Any) -> bool:
    return ones.keys() == others.keys() and all(_equal(value, others[name]) for name, value in ones.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _not_elementwise(optimizer: optim.Optimizer, why: str) -> ModelError:
    return ModelError(
        f"optimizer: {type(optimizer).__name__} {why}, and it would step parts of tensors on the host",
        hint="keep what it counts in the state of each parameter, choose another, or leave it on the device",
    )
