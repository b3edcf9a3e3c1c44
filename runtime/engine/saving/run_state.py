"""What of a run a checkpoint holds, and replaces where one is loaded, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...checkpoint.staging.sources import OnDrive
from ...mesh.collectives import Collectives
from ...mesh.join.groups import ProcessGroupMesh
from ...protocols import Holders
from ...zero.access.whole import ParamAccess
from ...zero.units.unit import ParamUnit
from ..compose.data import Data
from ..model.sharded import ShardedModel
from ..progress import Progress
from ..update import Update
from .over_stages import WholeNames

#: Plain values, arrays and tensors that a script has a checkpoint keep, or a function that returns them in time.
ClientState = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What of a run a checkpoint holds.

    Attributes:
        mesh: Ranks that the state is cut over, and their device.
        sharded: The model: parameters and buffers.
        names: Names of the tensors of all pipeline stages.
        update: Optimizer states, schedule and loss scale.
        data: Loader, whose position is saved.
        access: Values that the script has written to parameters, and what a failed load has left.
        progress: Counters of steps and samples.
        config: The config as a plain dict, which goes into a checkpoint for readers.
        on_drive: Function that finds state which lies on a drive; it is copied from there.
    """

    mesh: ProcessGroupMesh
    sharded: ShardedModel
    names: WholeNames
    update: Update
    data: Data
    access: ParamAccess
    progress: Progress
    config: dict[str, Any]
    on_drive: OnDrive

    @property
    def collectives(self) -> Collectives:
        """All ranks of the job."""
        return self.mesh.world

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.sharded.module

    @property
    def units(self) -> Sequence[ParamUnit]:
        """Units of trained parameters, in order."""
        return self.sharded.units

    @property
    def everyone(self) -> Holders:
        """The ranks of this one's pipeline stage, as holders of what each has whole whatever ZeRO cuts: buffers."""
        spec, replicas = self.mesh.spec, self.mesh.replicas()
        return Holders(spec.wide(spec.replica_axes()), replicas.rank, replicas.size)

    def settle(self) -> None:
        """Returns when no update is under way: state has its values of the last step."""
        if self.update.away is not None:
            self.update.away.settle()
