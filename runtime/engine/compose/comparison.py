"""What every rank must have been given alike, before anything is cut: model, optimizer groups, data and config.

Facts only; how ranks compare them is `mesh/agree/same.py`'s business.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from dsrun.config.config import Config

from ...mesh.agree.same import check_agreement
from ...mesh.join.groups import ProcessGroupMesh
from ...optim.groups import GroupAssignment
from ...zero.partition_parameters import home_of


def check_same_everywhere(
    model: nn.Module,
    settings: Config,
    assignment: GroupAssignment,
    training_data: Dataset[Any] | None,
    mesh: ProcessGroupMesh,
    *,
    updates: bool,
) -> None:
    """Refuses a model, config or dataset that is not the same on every rank; enters the collectives of the agreement.

    Args:
        model: the script's model, before anything of it is taken over.
        settings: the config.
        assignment: optimizer groups of its parameters.
        training_data: training dataset; its length is compared, if it has one. None without a dataset.
        mesh: mesh of the ranks, which are all compared.
        updates: whether there is an optimizer; ranks with one enter collectives that ranks without one do not.

    Raises:
        ModelError: naming what differs, the ranks that differ in it, and both values.
    """
    params, buffers = list(model.named_parameters()), list(model.named_buffers())
    facts = {
        "the model's parameters": [
            (name, {"shape": list(p.shape), "dtype": str(p.dtype), "requires_grad": p.requires_grad})
            for name, p in params
        ],
        "where the parameters' values come from": [
            (name, {"is_meta": p.is_meta, "home": type(home_of(p)).__name__}) for name, p in params
        ],
        "the model's buffers": [(name, {"shape": list(b.shape), "dtype": str(b.dtype)}) for name, b in buffers],
        "the optimizer's groups": [(name, {"group": assignment.group_of.get(id(p))}) for name, p in params],
        "whether there is an optimizer": updates,
        "the length of training_data": len(training_data) if isinstance(training_data, Sized) else None,
        "the config": settings.raw,
    }
    check_agreement(facts, mesh.world, device=mesh.device)
