"""Layers of a pipeline that are not built yet: what to build, and how, by DeepSpeed's names. Nothing is cut here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dsrun.errors import ModelError

from .ranks import job_rank


class LayerSpec:
    """A layer that only the rank builds that has it.

    Args:
        typename: class of the layer, a `torch.nn.Module`.
        module_args: positional arguments of the class.
        module_kwargs: keyword arguments of the class.

    Attributes:
        typename: class of the layer.
        module_args: positional arguments of the class.
        module_kwargs: keyword arguments of the class.
        global_rank: rank of this process in the job.

    Raises:
        ModelError: the class is no `torch.nn.Module`.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        kind: Any = typename
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ModelError(
                f"{type(self).__name__}: {kind!r} is no class of torch.nn.Module",
                hint="give the class, and its arguments after it; a function is a layer as it is, without a LayerSpec",
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = job_rank().rank

    def __repr__(self) -> str:
        """Returns the call that builds the layer."""
        words = [repr(word) for word in self.module_args]
        words += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(words)})"

    def build(self, log: bool = False) -> nn.Module:
        """Returns a new layer, built with the random generators as they are.

        Args:
            log: whether the layer is named in the log.
        """
        if log:
            from dsrun.log_on_ranks import logger

            logger.info(f"rank {self.global_rank} builds {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that has its parameters in common with the others of its key.

    The first one of a key says how all are built.

    Args:
        key: name that the layers have in common.
        typename: class of the layer, the same for all of the key.
        module_args: positional arguments of the class.
        forward_fn: function of (layer, value) that is called in place of the layer's forward; None: the forward.
        tied_weight_attr: names of the parameters that `get_tied_weights_and_groups` returns. All parameters are in
            common, as they are in DeepSpeed inside one stage.
        module_kwargs: keyword arguments of the class.

    Attributes:
        key: name that the layers have in common.
        forward_fn: function that is called in place of the layer's forward.
        tied_weight_attr: names of parameters, as a list.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
