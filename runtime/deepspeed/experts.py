"""Which parameters are experts, by DeepSpeed's mark `allreduce = False`, for scripts that ask this of every model.

No layer of experts is here: a model's own experts are parameters like others. Those that carry DeepSpeed's mark differ
from rank to rank, which nothing here trains; so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dsrun.errors import ModelError


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Returns whether a model has layers of DeepSpeed's class `MoE`, and how many experts: none, for there is no such
    class here.

    Args:
        m: Model.
    """
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Returns whether a parameter is marked as one of an expert that other ranks do not have.

    Args:
        param: Parameter.
    """
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Returns whether a group says that its parameters are experts.

    Args:
        param_group: Group, as an optimizer takes it.
    """
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters without and those with the mark of experts.

    Args:
        params: Parameters.
    """
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Returns groups as an optimizer takes them; they are the same dicts, for no expert is split off.

    Args:
        param_groups: One group, or several.
        max_group_size: Most elements of a group of experts; without effect where there is none.

    Raises:
        ModelError: A parameter has the mark of experts, or a group is no dict.
    """
    groups: list[Any] = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    for number, group in enumerate(groups):
        if not isinstance(group, dict):
            raise ModelError(
                f"param_groups: entry {number} is a {type(group).__name__}; expected a dict with `params`",
                hint="give one group of all parameters: {'params': list(model.parameters()), 'name': 'all'}",
            )
        group["params"] = list(group["params"])
        if any(is_moe_param(param) for param in group["params"]):
            raise ModelError(
                f"param_groups: group {number} has parameters with `allreduce = False`, which differ from rank to rank",
                hint="there is no expert parallelism: leave the mark out, and every rank trains all experts",
            )
    return groups
