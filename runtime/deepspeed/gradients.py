"""Norms of gradients and weights, clipping, and the search for numbers that overflowed, by DeepSpeed's names.

For scripts that do so themselves. The engine's own norm and clipping (`gradient_clipping`) are elsewhere
(`runtime/optim/norm.py`).

[Note: gradients of an engine] An engine keeps its gradients itself: `param.grad` of its parameters is None. What is
read and written here is the truth all the same: the mean over the ranks so far, by `safe_get_full_grad` and
`safe_set_full_grad`. So every rank must call with the same parameters. Until the step they carry fp16's loss scale, as
DeepSpeed's do; so those of fp16 parameters are not clipped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.errors import ModelError

from ..accelerator import get_accelerator
from ..zero.access.fragments import safe_get_full_grad, safe_set_full_grad
from ..zero.access.gathered import GatheredParameters

_Tensors = Tensor | Iterable[Tensor]


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a parameter says that it is one part of several, by `model_parallel` or `tensor_model_parallel`."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Returns whether a tensor holds a number that is not finite, as a tensor of one flag on its device."""
    values = x.coalesce().values() if x.is_sparse else x
    return ~torch.isfinite(values).all()


def a_gradient_overflows(params: Iterable[Tensor]) -> bool:
    """Whether a gradient of this process is not finite; of an engine's parameters see [Note: gradients of an engine].

    Args:
        params: parameters; those without a gradient are left out.
    """
    found = [bool(has_inf_or_nan(grad)) for _, grad in _gradients(params)]  # of all: reading may be collective
    return any(found)


def is_invalid_grad_norm(norm: Tensor | float) -> bool:
    """Whether a norm, or one of several in a tensor, is not finite or below 0."""
    values = torch.as_tensor(norm)
    return bool((~torch.isfinite(values) | (values < 0)).any())


def get_global_norm(norm_list: Iterable[Tensor | float]) -> float:
    """Returns the norm of all that has these 2-norms; infinity if one of them is invalid."""
    norms = list(norm_list)
    if any(is_invalid_grad_norm(norm) for norm in norms):
        return math.inf
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))


def get_global_norm_of_tensors(
    input_tensors: Iterable[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """Returns the norm of all tensors together.

    Args:
        input_tensors: tensors, at least one.
        norm_type: p of the p-norm, or infinity.
        mpu: model-parallel unit whose ranks have further tensors; every one of them must call. None: there are none.
        moe_ep_group: DeepSpeed's argument for experts; only None.

    Returns:
        one number in fp32 on the first tensor's device; -1 if it is not finite.

    Raises:
        ModelError: there is no tensor, or a group of experts is given.
    """
    tensors = list(input_tensors)
    if moe_ep_group is not None:
        raise _no_experts("get_global_norm_of_tensors: `moe_ep_group` is given")
    if not tensors:
        raise ModelError("get_global_norm_of_tensors: there is no tensor", hint="pass those that there are")
    power = float(norm_type)
    total = _over_model_ranks(_sum_of_powers((tensor.detach() for tensor in tensors), power), power, mpu)
    total = _root(total, power).to(tensors[0].device)
    return torch.where(torch.isfinite(total), total, torch.full_like(total, -1.0))


def clip_tensors_by_global_norm(
    input_tensors: Iterable[Tensor],
    max_norm: float = 1.0,
    global_norm: Tensor | float | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Tensor | float:
    """Scales tensors in place so that their norm is at most `max_norm`; leaves them alone if it is not finite.

    Args:
        input_tensors: tensors.
        max_norm: largest norm.
        global_norm: norm that they have together; None: it is computed.
        mpu: model-parallel unit, see `get_global_norm_of_tensors`.
        eps: number that is added to the norm before the division.

    Returns:
        the norm before; -1 if it was computed and is not finite.
    """
    tensors = list(input_tensors)
    norm = get_global_norm_of_tensors(tensors, mpu=mpu) if global_norm is None else global_norm
    factor = max_norm / (norm + eps)
    if not is_invalid_grad_norm(norm) and factor < 1:
        for tensor in tensors:
            tensor.detach().mul_(factor)
    return norm


def clip_grad_norm_(parameters: _Tensors, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Scales gradients in place so that their norm is at most `max_norm`.

    The norm is that of this rank's gradients, averaged over the ranks: every rank must call. Of an engine's parameters
    see [Note: gradients of an engine].

    Args:
        parameters: parameters whose gradients are scaled; those without one are left out.
        max_norm: largest norm.
        norm_type: p of the p-norm, or infinity.
        mpu: model-parallel unit whose ranks have further gradients; None: there are none.

    Returns:
        the norm before, one number in fp32 on the device of the first gradient.

    Raises:
        ModelError: no parameter has a gradient, engine.step has taken those that there were, or they are an engine's in
            fp16.
    """
    params = _listed(parameters)
    power = float(norm_type)
    total, device = _number(0.0), None
    for param, grad in _gradients(params):
        device = grad.device if device is None else device
        if param.grad is None and param.dtype == torch.float16:
            raise ModelError(
                "clip_grad_norm_: gradients of an engine in fp16 carry the loss scale until engine.step",
                hint="set `gradient_clipping` in the config: it counts without the scale",
            )
        if power == math.inf or _counts_here(param, mpu):
            total = _with_powers(total, grad, power)
    if device is None:
        raise ModelError(
            f"clip_grad_norm_: none of {len(params)} parameters has a gradient",
            hint="call it between engine.backward and engine.step, or set `gradient_clipping` in the config",
        )
    total = _root(_over_model_ranks(total, power, mpu), power)
    if dist.is_initialized():
        total /= dist.get_world_size()
        dist.all_reduce(total)
    total = total.to(device)
    factor = float(max_norm) / (total + 1e-6)
    if factor < 1:
        for param in params:
            if param.grad is not None:
                param.grad.detach().mul_(factor.to(param.grad.device))
            elif (grad := safe_get_full_grad(param)) is not None:
                safe_set_full_grad(param, grad.mul_(factor.to(grad.device)))
    return total


def get_flattened_grad_norm(
    parameters: _Tensors, norm_type: float = 2, mpu: Any = None, grad_norm_mask: Sequence[Any] | None = None
) -> float:
    """Returns the norm of gradients, of an engine's too: see [Note: gradients of an engine].

    Args:
        parameters: parameters; those without a gradient are left out.
        norm_type: p of the p-norm, or infinity.
        mpu: model-parallel unit whose ranks have further gradients; None: there are none.
        grad_norm_mask: for each parameter with a gradient, which is flat then, ranges of elements to leave out, of
            shape [n, 2]; None: nothing is left out. Without effect for infinity.

    Returns:
        the norm; 0 where there is no gradient, -1 if it is not finite.
    """
    power = float(norm_type)
    grads: Iterator[Tensor] = (grad for _, grad in _gradients(_listed(parameters)))
    if grad_norm_mask is not None and power != math.inf:
        grads = (_without(grad, ranges) for grad, ranges in zip(grads, grad_norm_mask, strict=True))
    total = float(_root(_over_model_ranks(_sum_of_powers(grads, power), power, mpu), power))
    return total if math.isfinite(total) else -1


def get_grad_zeros(parameters: _Tensors, mpu: Any = None) -> float:
    """Returns how many elements of gradients are 0, of an engine's too: see [Note: gradients of an engine].

    Args:
        parameters: parameters; those without a gradient are left out.
        mpu: model-parallel unit whose ranks have further gradients; None: there are none.
    """
    zeros = sum(
        grad.numel() - int(torch.count_nonzero(grad))
        for param, grad in _gradients(_listed(parameters))
        if _counts_here(param, mpu)
    )
    return float(_over_model_ranks(_number(zeros), 1.0, mpu))


def get_weight_norm(parameters: _Tensors, norm_type: float = 2, mpu: Any = None) -> float:
    """Returns the norm of parameters, of an engine's as forward reads them; at stage 3 every rank must call.

    Args:
        parameters: parameters.
        norm_type: p of the p-norm, or infinity.
        mpu: model-parallel unit whose ranks have further parameters; None: there are none.

    Returns:
        the norm; -1 if it is not finite.
    """
    power = float(norm_type)
    kept = [param for param in _listed(parameters) if power == math.inf or _counts_here(param, mpu)]
    total = float(_root(_over_model_ranks(_sum_of_powers(_weights(kept), power), power, mpu), power))
    return total if math.isfinite(total) else -1


class CheckOverflow:
    """Looks for gradients that are not finite; see [Note: gradients of an engine].

    Args:
        param_groups: lists of parameters that `check` looks at; None: those that it is given.
        mpu: model-parallel unit whose ranks have further gradients; None: there are none.
        zero_reduce_scatter: ask all ranks, for each has other gradients.
        deepspeed: engine; with `enable_backward_allreduce` False on it, all ranks are asked too. None: there is none.

    Raises:
        ModelError: a parameter is an expert's.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.params = None if param_groups is None else _of_groups(param_groups)
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed

    def check_using_norm(self, norm_group: Iterable[Tensor | float], reduce_overflow: bool = True) -> bool:
        """Whether one of several norms is invalid, on any rank.

        Args:
            norm_group: norms.
            reduce_overflow: ask all ranks, each of which must call; False: this one alone, or those of the model.
        """
        found = _number(any(is_invalid_grad_norm(norm) for norm in norm_group))
        if self.mpu is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.mpu.get_model_parallel_group())
        elif reduce_overflow and dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Whether a gradient is not finite.

        Args:
            param_groups: lists of parameters; None: those that this was made with.

        Raises:
            ModelError: there are none, or a parameter is an expert's.
        """
        params = self.params if param_groups is None else _of_groups(param_groups)
        if params is None:
            raise ModelError("CheckOverflow.check: there are no parameters", hint="pass `param_groups`, lists of them")
        return self.has_overflow(params)

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient that this rank has is not finite."""
        return a_gradient_overflows(params)

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient is not finite, on any of the ranks that share the model or have other gradients.

        Args:
            params: parameters; those without a gradient are left out.
            has_moe_params: DeepSpeed's argument for experts; not True.

        Raises:
            ModelError: parameters are experts'.
        """
        if has_moe_params:
            raise _no_experts("CheckOverflow.has_overflow: `has_moe_params` is True")
        found = _number(self.has_overflow_serial(params))
        reduces = getattr(self.deepspeed, "enable_backward_allreduce", True)
        if self.zero_reduce_scatter or (self.mpu is None and not reduces):
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        elif self.mpu is not None:
            if not reduces:
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.mpu.get_data_parallel_group())
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.mpu.get_model_parallel_group())
        return bool(found)


def _listed(parameters: _Tensors) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _of_groups(param_groups: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    params = [param for group in param_groups for param in group]
    if any(getattr(param, "allreduce", True) is False for param in params):
        raise _no_experts("CheckOverflow: a parameter has `allreduce` False")
    return params


def _no_experts(message: str) -> ModelError:
    return ModelError(
        message, hint="there are no groups of experts here: a model's own experts are trained as they are"
    )


def _gradients(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (parameter, gradient) of those that have one; see [Note: gradients of an engine]."""
    for param in params:
        grad = safe_get_full_grad(param) if param.grad is None else param.grad.detach()
        if grad is not None:
            yield param, grad


def _weights(params: Iterable[Tensor]) -> Iterator[Tensor]:
    for param in params:
        with GatheredParameters(param):
            yield param.detach()


def _counts_here(param: Tensor, mpu: Any) -> bool:
    """Whether a parameter is to be counted on this rank: those that several ranks of a model have, on the first."""
    if getattr(param, "ds_pipe_replicated", False):
        return False
    if mpu is None or is_model_parallel_parameter(param):
        return True
    ask = getattr(mpu, "get_tensor_model_parallel_rank", None) or mpu.get_model_parallel_rank
    return ask() == 0


def _without(grad: Tensor, ranges: Any) -> Tensor:
    kept = grad.clone()
    for start, stop in torch.as_tensor(ranges).tolist():
        kept[start:stop] = 0
    return kept


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), device=get_accelerator().current_device_name())


def _sum_of_powers(tensors: Iterable[Tensor], power: float) -> Tensor:
    """Returns the sum of the p-th powers of all elements, or the largest for infinity, on the accelerator."""
    total = _number(0.0)
    for tensor in tensors:
        total = _with_powers(total, tensor, power)
    return total


def _with_powers(total: Tensor, tensor: Tensor, power: float) -> Tensor:
    if not tensor.numel():
        return total
    if power == math.inf:
        return torch.maximum(total, tensor.abs().max().to(total))
    return total + torch.linalg.vector_norm(tensor.float(), power).pow(power).to(total)


def _root(total: Tensor, power: float) -> Tensor:
    return total if power == math.inf else total.pow(1.0 / power)


def _over_model_ranks(total: Tensor, power: float, mpu: Any) -> Tensor:
    if mpu is not None:
        op = dist.ReduceOp.MAX if power == math.inf else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=mpu.get_model_parallel_group())
    return total
