"""A model in chunks, as whoever runs a schedule sees it; plain models and lists of layers are cut in other modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several chunks use.

    Attributes:
        name: qualified name of the first use in the whole model.
        param: this rank's parameter; each chunk on a rank that uses it has one of its own, with the same values.
        chunk: chunk whose parameter it is.
        chunks: all chunks that use it, ascending, this one among them.
    """

    name: str
    param: nn.Parameter
    chunk: int
    chunks: tuple[int, ...]


class Stages(Protocol):
    """The chunks of a model that one rank has; see [Note: chunks] in `dsrun.pipeline_schedules.actions`.

    Attributes:
        module: model as this rank has it: parameters of its own chunks alone, under the names that they have in
            the whole model. Where other ranks have blocks of a stack, `AbsentBlock`s stand.
        rank_of: rank along the pipe axis of each chunk of the model.
        own: numbers of the chunks that this rank has, ascending.
        tied: this rank's parameters that more than one chunk uses.
        needs_batch: whether every chunk is given the micro batch; False: the first one and the loss alone need it.
    """

    module: nn.Module
    rank_of: tuple[int, ...]
    own: tuple[int, ...]
    tied: Sequence[TiedParameter]
    needs_batch: bool

    def run(self, chunk: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Any) -> Any:
        """Runs the forward of a chunk of this rank; no collective but those of the units' hooks.

        Args:
            chunk: number of the chunk.
            args: positional arguments of the model's forward, of this micro batch.
            kwargs: its keyword arguments.
            received: value that the chunk before has returned, None for the first chunk. Its tensors are leaves; those
                that carry gradients require them.

        Returns:
            what the next chunk needs: tensors in nested tuples, lists and dicts; of the last chunk, the model's output.

        Raises:
            ModelError: the model does something that cannot be cut, by name.
        """
        ...

    def modules_of(self, chunk: int) -> Sequence[nn.Module]:
        """Returns the outermost modules that belong to a chunk of this rank; each parameter is in one chunk's."""
        ...


@dataclass(frozen=True, slots=True)
class Partition:
    """Which layers each chunk has.

    Attributes:
        bounds: first layer of each chunk, and the number of layers at the end.
        names: name of each layer in the whole model.
        costs: cost of each layer, in any unit; empty where the layers were not weighed.
    """

    bounds: tuple[int, ...]
    names: tuple[str, ...]
    costs: tuple[float, ...] = field(default=())

    def layers_of(self, chunk: int) -> range:
        """Returns the numbers of a chunk's layers."""
        return range(self.bounds[chunk], self.bounds[chunk + 1])
