"""A list of layers as whoever runs a schedule sees it. The layers run themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from dsrun.errors import ModelError

from ..stages import TiedParameter

if TYPE_CHECKING:
    from ..module import PipelineModule


class LayerStages:
    """Chunks of a `PipelineModule` that this rank has; a `Stages`.

    Args:
        module: list of layers.
        tied: parameters that several layers have in common.

    Attributes:
        module: list of layers.
        rank_of: stage of each chunk.
        own: chunks of this rank.
        tied: parameters that several layers have in common.
        needs_batch: False; layers are given what the ones before return.
    """

    def __init__(self, module: PipelineModule, tied: Sequence[TiedParameter]) -> None:
        self.module: nn.Module = module
        self.rank_of = module.rank_of
        self.own = module.own
        self.tied = tied
        self.needs_batch = False
        self._layers = module

    def run(self, chunk: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Any) -> Any:
        """Runs the forward of a chunk of this rank.

        Args:
            chunk: number of the chunk.
            args: inputs of the first chunk: one tensor or tuple, or the items of a tuple.
            kwargs: keyword arguments, of which layers take none.
            received: value that the chunk before has returned.

        Raises:
            ModelError: there are keyword arguments.
        """
        if chunk > 0:
            return self._layers.run_chunk(chunk, received)
        if kwargs:
            raise ModelError(
                f"PipelineModule: the first layer is given {', '.join(kwargs)} by name; a layer takes one value",
                hint="give inputs as one tensor or a tuple; engine.set_batch_fn makes them of a batch",
            )
        return self._layers.run_chunk(chunk, args[0] if len(args) == 1 else args)

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Returns the modules of a chunk of this rank, each once."""
        return self._layers.modules_of(chunk)
