"""Any elementwise optimizer block by block, by its own code: one of torch's or the script's.

A twin of the optimizer, which has its class and attributes but a leaf and state of its own, steps one block after the
other. An update that reads its own element alone gives each element what it gives it in the whole.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from dsrun.errors import DsrunError, ModelError

from ...optim.structure.base import StructuredOptimizer
from ..states.blockwise import StateAccess, held_names, held_state, made_state
from ..states.range_work import RangeWork
from .blocks import Block, BlockCutter
from .inner_threads import inner_threads

#: A script's hooks run once a step, not once a block.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
#: Elements and steps of the trial; without a vector's tail.
_TRIAL_NUMEL, _TRIAL_STEPS = 512, 3
_TRIAL_RATE = 1e-2


class OwnCodeBlocks:
    """Steps ranges by an optimizer's own `step`.

    Args:
        optimizer: optimizer that gives its class and attributes.
        cutter: cuts ranges into blocks.
        threads: number of threads that torch's operations use; None for as many as those of the calling thread.
    """

    def __init__(self, optimizer: optim.Optimizer, cutter: BlockCutter, *, threads: int | None) -> None:
        self._optimizer = optimizer
        self._cutter = cutter
        self._threads = threads

    def step(self, work: RangeWork) -> None:
        """Updates one range; see `BlockStep`.

        Raises:
            ModelError: what the optimizer counts differs between blocks.
        """
        scalars_before = dict(work.scalars)
        widens = work.form.name != "fp32"
        found_here = ((name, held_state(work, name, widens=widens)) for name in held_names(work))
        known = {name: state for name, state in found_here if state is not None}
        made: dict[str, StateAccess] = {}
        kept: tuple[dict[str, Any], dict[str, Any]] | None = None
        with inner_threads(self._threads):
            for block in self._cutter.blocks(work, list(known.values()), 0, work.numel):
                states = dict(zip(known, block.states, strict=True))
                found = self._step_block(block, scalars_before, states, work, made)
                if kept is not None and not _same(kept, found):
                    raise _refusal(self._optimizer, "counts differently for each part of a tensor")
                kept = found
        work.settle()
        if kept is not None:
            work.scalars.update(kept[0])
            work.changed.update(kept[1])

    def _step_block(
        self,
        block: Block,
        scalars: Mapping[str, Any],
        states: Mapping[str, Tensor],
        work: RangeWork,
        made: dict[str, StateAccess],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Steps one block; returns its scalars, and the options that the step has set anew."""
        leaf = nn.Parameter(block.master)
        leaf.grad = block.grad
        options = {key: value for key, value in work.options.items() if key not in ("params", "param_names")}
        twin = _twin(self._optimizer, leaf, options)
        if scalars or states:
            twin.state[leaf] = {**{name: _copied(value) for name, value in scalars.items()}, **states}
        attributes = dict(vars(twin))
        type(twin).step(cast(Any, twin))
        moved = [name for name, value in vars(twin).items() if attributes.get(name) is not value]
        # torch's own classes note there what they have warned of, and which checks are done.
        if moved and not type(twin).__module__.startswith("torch."):
            raise _refusal(self._optimizer, f"keeps `{moved[0]}` for all parameters together")
        group = twin.param_groups[0]
        changed = {k: v for k, v in group.items() if k != "params" and (k not in options or options[k] is not v)}
        return _keep_states(twin.state[leaf], block, states, work, made), changed


def check_parts(optimizer: optim.Optimizer) -> None:
    """Refuses an optimizer whose blocks would not get what the whole gets: a trial of a few hundred elements.

    The random generators are left as they are, and so is the optimizer.

    Raises:
        ModelError: it needs whole tensors, or parts of a vector come out otherwise than in the whole.
    """
    if isinstance(optimizer, StructuredOptimizer):
        raise _refusal(optimizer, "knows which tensors its elements belong to")
    if not hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched") and "step" in vars(optimizer):
        raise _refusal(optimizer, "has had its `step` replaced on the object")
    for group in optimizer.param_groups:
        whole, parts = (_trial(optimizer, group, numel) for numel in (_TRIAL_NUMEL, _TRIAL_NUMEL // 2))
        if not all(_same(one, other) for one, other in zip(whole, parts, strict=True)):
            raise _refusal(optimizer, "gives the halves of a vector other values than the whole")


def _trial(optimizer: optim.Optimizer, group: dict[str, Any], block_numel: int) -> tuple[dict[str, Any], ...]:
    """Returns weights, states and scalars after some steps in blocks of `block_numel` elements."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(_TRIAL_NUMEL, generator=draw)
    made = optimizer.state.get(next(iter(group["params"]), weights), {})
    tensors = {name: value for name, value in made.items() if isinstance(value, Tensor) and value.ndim}
    states = {name: _spread(value) for name, value in tensors.items()}
    scalars = {name: _copied(value) for name, value in made.items() if name not in tensors}
    options = {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}
    if isinstance(options.get("lr"), float):
        options["lr"] = _TRIAL_RATE  # a warm-up may begin with 0, which tells nothing
    stepper = OwnCodeBlocks(optimizer, BlockCutter(block_numel), threads=None)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for step in range(_TRIAL_STEPS):
                grads = torch.randn(_TRIAL_NUMEL, generator=draw) * (step + 1)
                work = RangeWork(weights, grads, states, scalars, options)
                stepper.step(work)
                options |= work.changed
    except DsrunError:
        raise
    except Exception as error:
        raise _refusal(optimizer, f"cannot step a vector of numbers: {type(error).__name__}: {error}") from error
    return {"weights": weights}, states, scalars, options


def _keep_states(
    state: dict[str, Any], block: Block, states: Mapping[str, Tensor], work: RangeWork, made: dict[str, StateAccess]
) -> dict[str, Any]:
    """Writes states that do not lie in their place yet to where they belong; returns the scalars.

    Args:
        state: the twin's, after its step.
        block: block that was stepped.
        states: those that were there before, as the step had them.
        work: step of the range as a value: its masters, gradients and states.
        made: those that this step makes, by now.
    """
    scalars: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.shape != block.master.shape:
            scalars[name] = value
            continue
        if name in states:
            if states[name].data_ptr() != value.data_ptr():
                states[name].copy_(value)
            continue
        if name not in made:
            made[name] = made_state(work, name, value.dtype)
        made[name].close(block.start, value)
    return scalars


def _twin(optimizer: optim.Optimizer, leaf: nn.Parameter, options: dict[str, Any]) -> optim.Optimizer:
    """Returns an optimizer of the same class and attributes that has one leaf, no state and no hooks.

    Of its attributes, a `step` that a schedule has wrapped would lead to the optimizer itself.
    """
    twin = object.__new__(type(optimizer))
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    vars(twin).update({name: OrderedDict() for name in _HOOKS})
    twin.state = defaultdict(dict)
    twin.param_groups = [{"params": [leaf], **options}]
    return twin


def _spread(value: Tensor) -> Tensor:
    """Returns a state for the trial such as an optimizer has made for a tensor of another size."""
    first = value.detach().reshape(-1)[:1]
    return torch.zeros(_TRIAL_NUMEL, dtype=value.dtype).add_(first.cpu() if first.numel() else 0)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    """Whether two values, dicts or tuples of them, are equal to the bit; NaN is equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.nan_to_num(0.25), other.nan_to_num(0.25)) and torch.equal(one.isnan(), other.isnan())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(_same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def _refusal(optimizer: optim.Optimizer, reason: str) -> ModelError:
    return ModelError(
        f"optimizer: {type(optimizer).__name__} {reason}, and the host steps parts of tensors one by one",
        hint="choose an elementwise optimizer (AdamW, Lion, SGD; counts in the state of each parameter), or leave "
        "`offload_optimizer` out",
    )
