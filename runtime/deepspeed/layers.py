"""What scripts wrap around layers by DeepSpeed's names: `TiledMLP`, sequences that are cut, a context that gathers.

The tiles themselves are in `runtime/long_sequence/tiling.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from dsrun.errors import ModelError

from ..long_sequence.tiling import tiled


class TiledMLP:
    """A function over shards of a sequence: DeepSpeed's words for `dsrun.long_sequence.tiled`."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        module: nn.Module,
        x: Tensor,
        shards: int,
        compute_params: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Returns `fn(module, x)`, computed shard by shard and again in backward.

        Parameters of the module and of `compute_params` get gradients, once, as those of any operation.

        Args:
            fn: function that treats every position alike, shape [..., L, D] to [..., L, E].
            module: module that `fn` is called with.
            x: shape [..., L, D], floating point.
            shards: shards that the L positions are cut into, as `torch.chunk` cuts them.
            compute_params: further parameters that `fn` uses; None: those of the module are all.

        Returns:
            shape [..., L, E].

        Raises:
            ModelError: no shards, `x` has no dimension of positions, or `fn` returned something of another shape.
        """
        if shards < 1:
            raise ModelError(f"TiledMLP.apply: shards is {shards}; expected a number above 0")
        positions = x.shape[-2] if x.dim() > 1 else 1
        return tiled(_Call(fn, module, compute_params or ()), x, tile_size=max(1, -(-positions // shards)))


class UlyssesSPAttentionHF:
    """What trainers ask for a sequence that is cut over ranks; here they learn that it is whole."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: object,
        core_attn_implementation: object,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> None:
        """Returns None, as DeepSpeed does for one rank a sequence: trainers ask it at every size.

        Args:
            model_name_or_path: model, or its name.
            core_attn_implementation: attention of the model, or its name.
            sequence_parallel_size: ranks that share a sequence.
            micro_batch_size: samples of a micro batch.
            seq_length: positions of every sequence.
            seq_length_is_variable: DeepSpeed's switch for lengths that differ.
            disable_in_eval: DeepSpeed's switch for evaluation.
            max_length: older name of `seq_length`.

        Raises:
            ModelError: a sequence is to be cut over ranks.
        """
        del model_name_or_path, core_attn_implementation, micro_batch_size
        del seq_length, seq_length_is_variable, disable_in_eval, max_length
        if sequence_parallel_size != 1:
            raise ModelError(
                f"UlyssesSPAttentionHF.register_with_transformers: sequence_parallel_size is {sequence_parallel_size}; "
                "dsrun cuts no sequence over ranks yet",
                hint="set it to 1; docs/guides/long-sequences.md says what keeps a long sequence small on each rank",
            )


class GatherReplacedLayerParams:
    """A context in which the parts of a tensor-parallel layer are whole: nothing happens, for layers are not cut.

    Parameters that ZeRO shards are another matter: `zero.GatheredParameters`.

    Args:
        params: parameter, or parameters.
        module: module that has them.
        enabled: DeepSpeed's switch.
    """

    def __init__(self, params: Iterable[Tensor] | Tensor, module: nn.Module, enabled: bool = True) -> None:
        del params, enabled
        self.module = module
        self.enabled = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _Call(nn.Module):
    """A function of a module, as a module with that module's parameters. Hooks of the module are not called."""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor], module: nn.Module, further: Iterable[Tensor]) -> None:
        super().__init__()
        self._fn = fn
        self._of = (module,)  # in a tuple: it is no module of this one
        known = {id(param) for param in module.parameters()}
        self._params = [*module.parameters(), *(param for param in further if id(param) not in known)]

    def parameters(self, recurse: bool = True) -> Any:
        """Yields the parameters, which are another module's and registered there."""
        del recurse
        return iter(self._params)

    def forward(self, x: Tensor) -> Tensor:
        return self._fn(self._of[0], x)
