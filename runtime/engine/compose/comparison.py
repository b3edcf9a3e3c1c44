"""What every rank must have been given alike, before anything is cut: model, optimizer groups, data and config.

Facts only; how ranks compare them is `mesh/agree/same.py`'s business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dsrun.config.config import Config
from dsrun.errors import DsrunError, ModelError

from ...mesh.agree.all_or_none import all_or_none
from ...mesh.agree.same import check_agreement
from ...mesh.join.groups import ProcessGroupMesh
from ...optim.groups import GroupAssignment
from ...zero.partition_parameters import home_of
from ..model.first_values import is_cut_from_whole


def check_same_everywhere(
    model: nn.Module,
    settings: Config,
    assignment: GroupAssignment,
    training_data: Dataset[Any] | None,
    mesh: ProcessGroupMesh,
    *,
    updates: bool,
) -> None:
    """Refuses a config, dataset or model that is not the same on every rank; a stage's model is that of its ranks.

    Enters the collectives of the agreement, over all ranks, and where ranks have built stages over each one's ranks.

    Args:
        model: the script's model, or this rank's stage of it, before anything of it is taken over.
        settings: the config.
        assignment: optimizer groups of its parameters.
        training_data: training dataset; its length is compared, if it has one. None without a dataset.
        mesh: mesh of the ranks that are compared.
        updates: whether there is an optimizer; ranks with one enter collectives that ranks without one do not.

    Raises:
        ModelError: naming what differs, the ranks that differ in it, and both values.
    """
    params, buffers = list(model.named_parameters()), list(model.named_buffers())
    of_stage: dict[str, object] = {
        "the model's parameters": [
            (name, {"shape": list(p.shape), "dtype": str(p.dtype), "requires_grad": p.requires_grad})
            for name, p in params
        ],
        "where the parameters' values come from": [
            (name, {"is_meta": p.is_meta, "home": type(home_of(p)).__name__}) for name, p in params
        ],
        "the model's buffers": [(name, {"shape": list(b.shape), "dtype": str(b.dtype)}) for name, b in buffers],
        "whether the buffers have values": [(name, {"is_meta": b.is_meta}) for name, b in buffers],
        "the values of quantised tensors": [
            (name, {"values": _digest_of_quantised(t)}) for name, t in [*params, *buffers] if t.is_quantized
        ],
        "the optimizer's groups": [(name, {"group": assignment.group_of.get(id(p))}) for name, p in params],
    }
    of_all: dict[str, object] = {
        "whether there is an optimizer": updates,
        "the length of training_data": len(training_data) if isinstance(training_data, Sized) else None,
        "the config": settings.raw,
    }
    spec = mesh.spec
    if spec.stages == 1 or is_cut_from_whole(model, settings):
        check_agreement({**of_stage, **of_all}, mesh.world, device=mesh.device)
        return
    check_agreement(of_all, mesh.world, device=mesh.device)
    stage, peers = spec.stage_of(mesh.info.rank), spec.peers(mesh.info.rank, spec.replica_axes())
    error: DsrunError | None = None
    try:
        check_agreement(of_stage, mesh.replicas(), device=mesh.device, ranks=peers, whose=f" of stage {stage}")
    except ModelError as found:
        error = found
    # Ranks of other stages would wait for these.
    all_or_none(partial(_raise, error), mesh.world, device=mesh.device, label="model", where="dsrun.initialize")


def _digest_of_quantised(tensor: Tensor) -> str:
    """Returns a digest of what the integers stand for; no broadcast of first values reaches such a tensor."""
    if tensor.is_meta:
        return "none"
    values = tensor.detach().dequantize().cpu().contiguous().view(-1)
    return hashlib.sha256(bytes(values.view(torch.uint8).tolist())).hexdigest()[:16]


def _raise(error: DsrunError | None) -> None:
    if error is not None:
        raise error
