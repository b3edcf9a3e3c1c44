"""Parameter groups: from what the user gave to (parameter -> group number, hyperparameters a group).

No shards here; the optimizer over shards is built elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dsrun.errors import ModelError


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """Which optimizer group each parameter is in that is in one.

    Attributes:
        group_of: id of a parameter to its group's number.
        options: hyperparameters of each group (lr, weight_decay, ...) that differ from the optimizer's own.
    """

    group_of: Mapping[int, int]
    options: tuple[dict[str, Any], ...]


def assign_groups(
    model: nn.Module, given: Iterable[Any] | None, *, argument: str = "model_parameters"
) -> GroupAssignment:
    """Assigns parameters of `model` to groups; trainable ones in no group get gradients, and nobody updates them.

    Args:
        model: the model.
        given: parameters, (name, parameter) pairs or group dicts, as for torch optimizers; None for one group of all
            trainable ones.
        argument: name of the argument of `dsrun.initialize` that the parameters were passed as, for messages.

    Raises:
        ModelError: a parameter is in two groups, or no trainable one is in any.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    trainable = {id(param): param for param in model.parameters() if param.requires_grad}
    if given is None:
        return GroupAssignment(dict.fromkeys(trainable, 0), ({},))
    entries = list(given)
    if not entries or not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    group_of: dict[int, int] = {}
    options: list[dict[str, Any]] = []
    for number, entry in enumerate(entries):
        for param in _bare(entry["params"]):
            if not isinstance(param, Tensor):
                raise ModelError(
                    f"{argument}: group {number} holds a {type(param).__name__}; expected parameters of the model",
                    hint="pass model.parameters(), a list of them, or group dicts as for torch's optimizers",
                )
            if id(param) not in names:
                raise ModelError(
                    f"{argument}: group {number} holds a tensor of shape {tuple(param.shape)} "
                    f"that is no parameter of {type(model).__name__}",
                    hint="pass parameters of the model given to dsrun.initialize",
                )
            if group_of.setdefault(id(param), number) != number:
                raise ModelError(
                    f"{argument}: `{names[id(param)]}` is in groups {group_of[id(param)]} and {number}",
                    hint="put each parameter into one group",
                )
        options.append({key: value for key, value in entry.items() if key not in ("params", "param_names")})
    if trainable and not trainable.keys() & group_of.keys():
        raise ModelError(
            f"{argument}: all {len(trainable)} trainable parameters of {type(model).__name__} are in no group, "
            "nothing to train",
            hint="give the optimizer parameters of the model that have requires_grad",
        )
    return GroupAssignment(group_of, tuple(options))


def check_trainable(model: nn.Module, *, trains_none: bool = False) -> None:
    """Refuses a model that an optimizer would have nothing to do for.

    Args:
        model: the model.
        trains_none: whether the script has given an empty list of parameters.

    Raises:
        ModelError: no parameter is trainable or was given, or those that are have no elements.
    """
    if trains_none:
        assign_groups(model, [])
    params = list(model.parameters())
    trainable = [param for param in params if param.requires_grad]
    if trainable and not any(param.numel() for param in trainable):
        raise ModelError(
            f"model: all {len(trainable)} trainable parameters of {type(model).__name__} have zero elements, nothing "
            "to train",
            hint="give the model its sizes before dsrun.initialize; to evaluate only, leave the optimizer out",
        )
    if not trainable:
        raise ModelError(
            f"model: none of the {len(params)} parameters of {type(model).__name__} is trainable, nothing to train",
            hint="set requires_grad on the parameters to train before dsrun.initialize; to evaluate only, leave the "
            "optimizer out",
        )


def _bare(params: Any) -> Sequence[Any]:
    if isinstance(params, nn.Parameter):
        return [params]
    return [item[1] if isinstance(item, tuple) else item for item in params]
