"""Which messages an axis has: none, through memory that its ranks share, or torch.distributed's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from ...compat import timeout_of
from ..collectives import WaitObserver
from ..host_memory.collectives import exchange_over
from ..host_memory.segments import find_hosts
from ..step_position import Where
from .alone import AlonePointToPoint
from .c10d import C10dPointToPoint, LaneGroups
from .links import Lane, PointToPoint
from .mailbox import MailboxPointToPoint

#: What the groups of links are for. Under NCCL the two directions of a lane have a group each.
LinkPurpose = Literal["activations", "gradients", "activations back", "gradients back", "heads"]

_log = logging.getLogger(__name__)


def make_links(
    group: dist.ProcessGroup | None,
    observer: WaitObserver | None,
    *,
    where: Where,
    device: torch.device,
    make_group: Callable[[LinkPurpose], dist.ProcessGroup],
) -> PointToPoint:
    """Returns the messages along an axis; every rank of the axis must call.

    Args:
        group: process group of the axis; None where it has one rank.
        observer: observer that is told of this rank's waits; None for no observer.
        where: the step this rank is in, for errors.
        device: device of this rank's tensors.
        make_group: function that makes another group of the same ranks; one for `heads` is Gloo's, the others have the
            backend of `group`. Called in one order on all ranks.
    """
    if group is None or group.size() == 1:
        return AlonePointToPoint()
    if device.type != "cpu":
        return C10dPointToPoint(
            {
                Lane.ACTIVATIONS: LaneGroups(make_group("activations"), make_group("activations back")),
                Lane.GRADIENTS: LaneGroups(make_group("gradients"), make_group("gradients back")),
            },
            observer,
            heads=make_group("heads"),
            where=where,
            device=device,
        )
    if len(find_hosts(exchange_over(group))) == 1:
        try:
            return MailboxPointToPoint(group, observer, timeout_s=timeout_of(group), where=where)
        except OSError as error:
            if group.rank() == 0:
                _log.warning("the ranks cannot share memory (%s): Gloo moves messages between stages, slower", error)
    activations, gradients = make_group("activations"), make_group("gradients")
    return C10dPointToPoint(
        {
            Lane.ACTIVATIONS: LaneGroups(activations, activations),
            Lane.GRADIENTS: LaneGroups(gradients, gradients),
        },
        observer,
        where=where,
    )
