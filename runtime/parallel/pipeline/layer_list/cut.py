"""Which stage has which layers of a list, and what cannot be cut. Builds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dsrun.errors import ModelError
from dsrun.pipeline_schedules.partition import balance, by_pattern, explicit, uniform

from ..layers import LayerSpec, TiedLayerSpec
from ..stages import Partition
from ..topology import PipeDataParallelTopology, ProcessTopology
from .build import label_of

#: How messages begin about the way in which a script has its layers cut.
_METHOD = "PipelineModule: partition_method"


def ranks_of_chunks(stages: int, virtual_stages: int, placement: str) -> tuple[int, ...]:
    """Returns the stage of each chunk.

    Args:
        stages: number of stages.
        virtual_stages: chunks of a stage.
        placement: `loop` or `v`.

    Raises:
        ModelError: the placement is unknown, or there are no chunks.
    """
    if virtual_stages < 1:
        raise ModelError(f"PipelineModule: virtual_stages is {virtual_stages}; expected 1 or more")
    if placement not in ("loop", "v"):
        raise ModelError(f"PipelineModule: placement is {placement!r}; expected `loop` or `v`")
    there, back = list(range(stages)), list(range(stages))[:: -1 if placement == "v" else 1]
    return tuple(rank for turn in range(virtual_stages) for rank in (back if turn % 2 else there))


def checked_topology(stages: int | None, topology: ProcessTopology | None, world_size: int) -> ProcessTopology:
    """Returns the grid of the ranks: stages as its slowest axis, and copies.

    Args:
        stages: number of stages; None: that of the topology.
        topology: grid of the ranks; None: stages, and as many copies as there are ranks for.
        world_size: ranks of the job.

    Raises:
        ModelError: ranks, stages and the topology do not go together.
    """
    if topology is None:
        if stages is None:
            raise ModelError("PipelineModule: neither num_stages nor topology is given", hint="give one of them")
        if stages < 1 or world_size % stages:
            raise ModelError(
                f"PipelineModule: num_stages is {stages}; expected a divisor of the job's {world_size} ranks",
                hint="start a multiple of the stages",
            )
        return PipeDataParallelTopology(num_pp=stages, num_dp=world_size // stages)
    sizes = {axis: topology.get_dim(axis) for axis in topology.get_axis_names()}
    cut = [axis for axis, size in sizes.items() if size > 1]
    if not set(cut) <= {"pipe", "data"}:
        raise ModelError(
            f"PipelineModule: the topology has axes {sizes}; layers are not cut over ranks here",
            hint="give num_stages in its place; `tensor_parallel.autotp_size` says how many ranks share a layer",
        )
    if "pipe" not in sizes or cut == ["data", "pipe"]:
        raise ModelError(
            f"PipelineModule: the topology has axes {sizes}; expected `pipe` before `data`: the ranks of a stage are "
            "neighbours",
            hint="take PipeDataParallelTopology",
        )
    if stages is not None and stages != sizes["pipe"]:
        raise ModelError(
            f"PipelineModule: num_stages is {stages}, and the topology has {sizes['pipe']} stages",
            hint="leave num_stages out",
        )
    return topology


def bounds_of(
    specs: Sequence[Any], chunks: int, method: str | Sequence[int], *, costs: Callable[[], Sequence[float]]
) -> list[int]:
    """Returns the first layer of each chunk, and the number of layers at the end.

    Args:
        specs: layers.
        chunks: number of chunks.
        method: method of a `PipelineModule`, or the bounds themselves.
        costs: callback that returns the cost of each layer; called where the method weighs.

    Raises:
        ModelError: the method is unknown.
        InputError: the bounds or the pattern do not fit the layers.
    """
    if not isinstance(method, str):
        return list(explicit(method, len(specs), chunks, label=_METHOD))
    match method.lower().partition(":"):
        case ("uniform", "", ""):
            return list(uniform(len(specs), chunks))
        case ("parameters", "", ""):
            return list(balance(costs(), chunks))
        case ("type", ":", pattern) if pattern:
            # Of the method as it was written: `\D` is not `\d`.
            names = [label_of(layer) for layer in specs]
            return list(by_pattern(names, method[len("type:") :], chunks, label=_METHOD))
        case _:
            raise ModelError(
                f"{_METHOD} is {method!r}; expected `parameters`, `uniform`, `type:REGEX` or a list of bounds",
                hint="`profile` is not there, nor is it in DeepSpeed; give the bounds that you have measured"
                if method.lower() == "profile"
                else None,
            )


def check_layers(specs: Sequence[Any], chunks: int, *, inner: type[nn.Module]) -> None:
    """Refuses what is no layer, keys of several classes, and fewer layers than chunks.

    Args:
        specs: layers.
        chunks: number of chunks.
        inner: class of lists of layers, which may not be layers themselves.

    Raises:
        ModelError: a layer is refused.
    """
    kinds: dict[str, type[nn.Module]] = {}
    for index, layer in enumerate(specs):
        if isinstance(layer, inner) or not (isinstance(layer, nn.Module | LayerSpec) or callable(layer)):
            raise ModelError(
                f"PipelineModule: layer {index} is a {type(layer).__name__}; expected a module, a LayerSpec or a "
                "function",
                hint="list the layers of the inner one" if isinstance(layer, inner) else None,
            )
        if isinstance(layer, TiedLayerSpec) and kinds.setdefault(layer.key, layer.typename) != layer.typename:
            raise ModelError(
                f"PipelineModule: layer {index} of key {layer.key!r} is a {layer.typename.__name__}, and the first of "
                f"that key a {kinds[layer.key].__name__}",
                hint="take one class for a key; forward_fn says what a layer does with it",
            )
    if len(specs) < chunks:
        raise ModelError(
            f"PipelineModule: there are {len(specs)} layers for {chunks} chunks; expected one for each at least",
            hint="take fewer stages or virtual_stages",
        )


def check_shared(specs: Sequence[Any], partition: Partition) -> None:
    """Refuses parameters of plain modules that layers of several chunks have: they would drift apart.

    Args:
        specs: layers.
        partition: layers of each chunk.

    Raises:
        ModelError: a parameter is in two chunks.
    """
    owner: dict[int, tuple[int, int]] = {}
    for chunk in range(len(partition.bounds) - 1):
        for index in partition.layers_of(chunk):
            layer = specs[index]
            for name, param in layer.named_parameters() if isinstance(layer, nn.Module) else ():
                first, of_chunk = owner.setdefault(id(param), (index, chunk))
                if of_chunk != chunk:
                    raise ModelError(
                        f"PipelineModule: layers {first} and {index} are in chunks {of_chunk} and {chunk} and share "
                        f"the parameter {name!r}",
                        hint="make both a TiedLayerSpec of one key",
                    )
