"""Base of the optimizers that know which tensors their flat leaves are made of.

A plain torch optimizer is exact on flat shards if it is elementwise. These are not: they need a norm of each tensor, a
sum over each row, blocks of 256 elements, or whole matrices. They say so by what they override:

| need | how it is met |
|---|---|
| tensors of one kind together (matrices apart from the rest) | `kind_of`: leaves are cut where the kind changes |
| sums over a tensor, its rows or blocks | `Run.pieces` and `exact_sums`: two all-reduces of one small vector |
| blocks of fixed size | shards are cut at multiples of 256, so a grid of the flat buffer is never divided |
| whole matrices | `whole_matrices`: an all-gather and a reduce-scatter |

They work on plain tensors too, without an engine: each tensor is then a run of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim

from dsrun.checkpoint_files.index.region import TensorBoxes, uncut
from dsrun.errors import ModelError
from dsrun.units import format_names

from ...layout.unit_layout import TENSOR_ALIGN, ShardPiece, UnitLayout, lay_out
from ...mesh.collectives import Collectives
from ...protocols import Holders, OwnedRange, StateEntry
from .exact_sums import TermRanks
from .runs import Run

#: Names of tensors that a message has.
_NAMED = 3

#: Elements that one pass works on: 128 KiB of each fp32 state stay in a core's cache from operation to operation.
_CPU_CHUNK = 1 << 15
#: On a GPU a chunk bounds temporary memory only.
_GPU_CHUNK = 1 << 24

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the model, whether or not this rank holds a piece of it; the same list on every rank.

    Attributes:
        name: qualified name.
        shape: shape of the tensor: of the part in its unit's flat buffer, where it is cut.
        group: number of its optimizer group.
        layout: flat buffer of its unit.
        offset: first element in that buffer.
        whole: boxes of the whole tensor that it is.
        ranks: all ranks that its unit is cut over, or that own it whole.
        over_stages: this rank and those of other pipeline stages with the same samples, where several stages use the
            tensor; None where this stage alone does.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    layout: UnitLayout
    offset: int
    whole: TensorBoxes
    ranks: Holders
    over_stages: Collectives | None = None

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return torch.Size(self.shape).numel()


class StructuredOptimizer(optim.Optimizer, ABC):
    """A torch optimizer over flat leaves that knows what they are made of; see the table above.

    Each group counts its updates in `step`, an int, so that a checkpoint keeps it with the other options. Tensors
    without a gradient are left as they are, and `missed` of their group has how many updates each was left out of.

    Args:
        params: parameters or group dicts, as for any torch optimizer.
        defaults: hyperparameters.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "step": 0})
        self.runs: Sequence[Run] = ()
        self.tensors: Sequence[TensorInfo] = ()
        self.axis: Collectives | None = None
        self.device = torch.device("cpu")
        self._is_bound = False
        self._in_engine = False
        self._left_out: frozenset[str] = frozenset()

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Returns the kind of a tensor; see `KindOf`."""
        return ""

    def takes_parts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor may be cut over ranks, of which each updates its part as a tensor of its own.

        Args:
            name: qualified name of the tensor.
            shape: shape of the whole tensor.
        """
        return False

    def bind(
        self,
        runs: Sequence[Run],
        tensors: Sequence[TensorInfo],
        axis: Collectives | None,
        *,
        device: torch.device,
    ) -> None:
        """Says what the leaves are made of.

        Args:
            runs: runs of this rank; their `param` tensors are the leaves in the groups.
            tensors: all tensors that are trained, on whichever rank, in the same order on every rank.
            axis: collectives of the ranks that the runs are spread over; None where this rank holds everything.
            device: device of the leaves, also for a rank that has none.

        Raises:
            ModelError: a tensor is cut that must be whole, or a leaf is not contiguous fp32.
        """
        check_whole(self, tensors)
        for run in runs:
            _check_plain(run.owned.layout.name, run.param)
        self.runs, self.tensors, self.axis, self.device = runs, tensors, axis, device
        self._is_bound = self._in_engine = True
        self.prepare()

    def leave_out(self, names: Collection[str], missed: Mapping[str, int]) -> None:
        """Says which tensors the next updates leave as they are, until it says otherwise; for who has bound the runs.

        Args:
            names: names of the tensors to leave out, the same on every rank; a run has only such tensors, or none of
                them.
            missed: updates that tensors were left out of, the next one of `names` counted.
        """
        self._left_out = frozenset(names)
        for group in self.param_groups:
            if missed or "missed" in group:
                group["missed"] = dict(missed)

    @property
    def stepped_runs(self) -> list[Run]:
        """The runs that this update is of."""
        if not self._left_out:
            return list(self.runs)
        return [run for run in self.runs if run.first_name not in self._left_out]

    @property
    def stepped_tensors(self) -> list[TensorInfo]:
        """The tensors that this update is of, on whichever rank."""
        return [info for info in self.tensors if info.name not in self._left_out]

    def ranks_of_sums(self, tensor_of_K: Sequence[int]) -> TermRanks | None:
        """Returns the ranks that the terms of K sums are spread over, for `exact_sums`; None where this rank has all.

        Args:
            tensor_of_K: position in `tensors` of the tensor that each sum is over, or over a part of.
        """
        if self.axis is None:
            return None
        places: dict[int, tuple[Collectives, list[int]]] = {}
        # What stages share comes in the order of its names, so on all of them alike; see `find_units`.
        for number, info in enumerate(self.tensors):
            if info.over_stages is not None:
                found = [place for place, tensor in enumerate(tensor_of_K) if tensor == number]
                places.setdefault(id(info.over_stages), (info.over_stages, []))[1].extend(found)
        further = [(stages, torch.tensor(found, device=self.device)) for stages, found in places.values()]
        return TermRanks(self.axis, further)

    def is_left_out(self, name: str) -> bool:
        """Whether this update leaves a tensor as it is."""
        return name in self._left_out

    def step_of(self, name: str, group: int) -> int:
        """Returns how many updates a tensor has had, this one counted.

        Args:
            name: name of the tensor.
            group: its number.
        """
        options = self.param_groups[group]
        missed: Mapping[str, int] = options.get("missed", {})
        return options["step"] - missed.get(name, 0)

    def step_of_run(self, run: Run) -> int:
        """Returns how many updates the tensors of a run have had, this one counted."""
        options = self.param_groups[run.group]
        return self.step_of(run.first_name, run.group) if options.get("missed") else options["step"]

    def part_of_state(self, run: Run, part: Run, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what of a run's state belongs to a part of it that is to be a run of its own; may be views."""
        values = {role: value for role, value in state.items() if value.shape == run.param.shape}
        return {role: value.narrow(0, part.start - run.start, part.numel) for role, value in values.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Takes one step; every rank of the axis must call.

        Args:
            closure: function that computes the loss again, as for torch's optimizers; None for none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_bound:
            self._bind_plain_tensors()
        if not self._in_engine:
            self._leave_out_plain_tensors()
        for group in self.param_groups:
            group["step"] += 1
        self.update()
        return loss

    @abstractmethod
    def prepare(self) -> None:
        """Allocates all states, zeroed; called once, when runs are known."""

    @abstractmethod
    def update(self) -> None:
        """Updates every run; `group["step"]` counts this step already, from 1 on."""

    def state_roles(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Returns the roles of the states that a checkpoint holds of a tensor."""
        raise NotImplementedError

    def state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """Returns the bytes of all states of a tensor; a block that two tensors share counts by elements."""
        raise NotImplementedError

    def states_per_element(self) -> float:
        """Returns the states of an element, counted in fp32 values: the mean over all tensors."""
        numel = sum(info.numel for info in self.tensors)
        return sum(self.state_bytes(info.name, info.shape) for info in self.tensors) / 4 / max(1, numel)

    def entries(self) -> Iterator[StateEntry]:
        """Yields this rank's pieces of all states; loading writes into the same pieces."""
        for run in self.runs:
            for role, value in self.state[run.param].items():
                if value.shape == run.param.shape:
                    yield from elementwise_entries(run, role, value)

    def state_tensors(self) -> Iterator[Tensor]:
        """Yields every tensor of state, for memory reports."""
        for run in self.runs:
            yield from self.state[run.param].values()

    def grad(self, run: Run) -> Tensor:
        """Returns a run's gradient, flat and fp32."""
        grad = run.param.grad
        return run.grad if grad is None else grad.reshape(-1)

    def _bind_plain_tensors(self) -> None:
        """Each tensor is a run of its own: for use without an engine."""
        runs: list[Run] = []
        tensors: list[TensorInfo] = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                _check_plain(name, param)
                layout = lay_out(name, [(name, param.shape)], world_size=1)
                flat = param.detach().view(-1)
                owned = OwnedRange(layout, 0, flat, torch.zeros_like(flat), (number,))
                runs.append(Run(owned, number, self.kind_of(name, tuple(param.shape)), 0, param, owned.grad_sum))
                shape, ranks = tuple(param.shape), owned.ranks
                tensors.append(TensorInfo(name, shape, number, layout, 0, uncut(shape), ranks))
        runs = [run for run in runs if run.numel]
        self.bind(runs, tensors, None, device=runs[0].param.device if runs else self.device)
        self._in_engine = False

    def _leave_out_plain_tensors(self) -> None:
        """Leaves out what has no gradient, as torch's own optimizers do."""
        self._left_out = frozenset(run.first_name for run in self.runs if run.param.grad is None)
        for group, names in ((run.group, run.first_name) for run in self.runs if run.param.grad is None):
            missed: dict[str, int] = self.param_groups[group].setdefault("missed", {})
            missed[names] = missed.get(names, 0) + 1


def chunk_numel(device: torch.device) -> int:
    """Returns how many elements one pass works on: few on a CPU, so that they stay in the cache between operations."""
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


def chunks(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Cuts [0, numel) into ranges whose passes stay in the cache; cuts are multiples of 256 from the start on."""
    size = chunk_numel(device)
    for start in range(0, numel, size):
        yield start, min(numel, start + size)


def elementwise_entries(run: Run, role: str, values_N: Tensor) -> Iterator[StateEntry]:
    """Yields the pieces of tensors of a state with one value an element of the run."""
    flat = values_N.view(-1)
    for piece in run.pieces():
        part = flat.narrow(0, piece.shard_offset, piece.stop - piece.start)
        extent = piece.extent
        yield StateEntry(extent.name, role, extent.whole, piece.start, piece.stop, part, run.owned.holders)


def whole_entry(info: TensorInfo, role: str, values: Tensor) -> StateEntry:
    """Returns the entry of a small state of a tensor that every rank of its unit holds whole."""
    return StateEntry(info.name, role, uncut(values.shape), 0, values.numel(), values.view(-1), info.ranks)


def check_whole(optimizer: StructuredOptimizer, tensors: Sequence[TensorInfo]) -> None:
    """Refuses tensors that are cut over ranks and that an optimizer must see whole.

    Raises:
        ModelError: naming the first of them.
    """
    names = [
        info.name for info in tensors if info.whole.is_cut and not optimizer.takes_parts(info.name, info.whole.shape)
    ]
    if names:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__} must see whole tensors, and ranks have parts of "
            + first_names(names),
            hint="use an optimizer that updates each element by itself, such as AdamW, or leave these tensors whole",
        )


def first_names(names: Sequence[str]) -> str:
    """Returns the first names for a message, and how many there are besides."""
    return format_names(names, _NAMED)


def with_gap(piece: ShardPiece, run: Run) -> int:
    """Returns the elements of a piece together with the gap of zeros behind it: whole cells of 64, without a tail.

    On a vector's tail torch's kernels may round otherwise than in its body, and where tails are depends on how the
    tensor is cut.
    """
    numel = -(-(piece.stop - piece.start) // TENSOR_ALIGN) * TENSOR_ALIGN
    return min(numel, run.numel - piece.shard_offset)


def _check_plain(name: str, param: nn.Parameter) -> None:
    if param.dtype != torch.float32 or not param.is_contiguous():
        what = "not contiguous" if param.dtype == torch.float32 else str(param.dtype).removeprefix("torch.")
        raise ModelError(
            f"optimizer: parameter `{name}` is {what}; expected contiguous fp32",
            hint="let dsrun.initialize keep fp32 masters, or call .float() on the model",
        )
