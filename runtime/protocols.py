"""The types in which the runtime's features meet. Values and seams only: nothing is done here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from dsrun.checkpoint_files.index.region import TensorBoxes

from .layout.unit_layout import UnitLayout

if TYPE_CHECKING:
    from .mesh.collectives import Collectives


@dataclass(frozen=True, slots=True)
class Window:
    """Memory in the optimizer's own dtype, through which it sees ranges of other dtypes, one after the other.

    Attributes:
        grad: flat, as long as the longest range.
        master: flat memory for masters, as long as the longest range; None where masters already have the optimizer's
            dtype.
    """

    grad: Tensor
    master: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Holders:
    """Ranks that hold the same piece of state.

    Attributes:
        axes: names of the axes of ranks over which the piece repeats; () where one rank alone holds it.
        rank: number of this rank among them.
        size: number of them.
        stages: pipeline stages that hold it, where it repeats over several and an axis of `axes` has all; () elsewhere.
    """

    axes: tuple[str, ...]
    rank: int
    size: int
    stages: tuple[int, ...] = ()


#: Holders of a piece that this rank alone has.
SOLE_HOLDER = Holders((), 0, 1)


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """What one rank updates of one unit; the tensors belong to the unit and live as long as it.

    Attributes:
        layout: the unit's flat buffer.
        start: first element of the range in the flat buffer.
        master: flat, the range's parameters as updates leave them: fp32 but where 16-bit masters are asked for.
        grad_sum: flat, the range's gradients, reduced over ranks and summed over micro batches: fp32, or what the
            config says.
        groups: optimizer group of each extent of the layout; extents of one group are neighbours.
        window: shared by all ranges, where the optimizer computes in another dtype; None where it sees `master` and
            `grad_sum` themselves.
        holders: ranks that own the same range of the same unit.
        ranks: all ranks that the unit is cut over, or that own it whole.
        over_stages: this rank and those of other pipeline stages with the same samples, where several stages use the
            unit; None where this stage alone does.
    """

    layout: UnitLayout
    start: int
    master: Tensor
    grad_sum: Tensor
    groups: tuple[int, ...]
    window: Window | None = None
    holders: Holders = SOLE_HOLDER
    ranks: Holders = SOLE_HOLDER
    over_stages: Collectives | None = None

    @property
    def seen_master(self) -> Tensor:
        """The parameters as the optimizer sees them: `master`, or the window's memory while it is this range's turn."""
        shown = None if self.window is None else self.window.master
        return self.master if shown is None else shown.narrow(0, 0, self.master.numel())

    @property
    def seen_grad(self) -> Tensor:
        """The gradients as the optimizer sees them, likewise."""
        return self.grad_sum if self.window is None else self.window.grad.narrow(0, 0, self.grad_sum.numel())


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A piece of training state that a checkpoint saves and loads; all a checkpoint knows of any feature.

    Attributes:
        name: qualified name of the tensor it is a piece of.
        role: `param`, `buffer`, or the name of an optimizer state (`exp_avg`).
        whole: boxes of the whole tensor that this rank's tensor is made of.
        start: first element of this rank's tensor that the piece holds; its elements count box after box.
        stop: one past the last.
        tensor: flat view of the piece, stop - start elements; loading writes into it.
        holders: ranks that hold the same piece, of which each saves a part, and all load it.
    """

    name: str
    role: str
    whole: TensorBoxes
    start: int
    stop: int
    tensor: Tensor
    holders: Holders

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.whole.shape


@dataclass(frozen=True, slots=True)
class FileStretch:
    """Bytes of an open file.

    Attributes:
        descriptor: descriptor of the file.
        at: byte at which they begin.
        nbytes: number of bytes in the stretch.
    """

    descriptor: int
    at: int
    nbytes: int


class ChangeFence(Protocol):
    """Holds up who is about to change state of which a save has no copy yet; see `checkpoint/save/fence.py`."""

    def wait(self, unit: int) -> None:
        """Returns when masters and states of a unit may change; at once but while a checkpoint is being copied."""
        ...

    def wait_all(self) -> None:
        """Returns when any state may change."""
        ...


class Scheduler(Protocol):
    """What the engine asks of a learning-rate schedule: torch's, ours or the script's."""

    def step(self) -> None:
        """Counts one applied update."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, for a checkpoint."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over state from a checkpoint."""
        ...
