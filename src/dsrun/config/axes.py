"""How the ranks of a job are divided: the one place that does it, for the config, `dsrun plan` and the runtime alike.

A further axis is a row of `AXES`. What the axes' ranks do with each other stands in the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from dsrun.config.findings import Code, Finding, Severity
from dsrun.config.provenance import Kind
from dsrun.config.text.tree import Position
from dsrun.errors import ConfigError
from dsrun.mesh_spec import Axis, MeshSpec, Role

if TYPE_CHECKING:
    from dsrun.config.config import Config


@dataclass(frozen=True, slots=True)
class AxisRow:
    """An axis of ranks, as a config sizes it.

    Attributes:
        name: name of the axis.
        title: name of the axis in messages.
        size: function that returns its size in a config; None: it has the ranks that the other axes leave.
        roles: roles that its ranks play beside `world`.
        cuts: whether some parameters are cut along it.
        keys: dotted keys of a config that size it or switch it on; those with its size come first.
        is_open: function that tells whether a config leaves its size to the script's model or to a plan.
    """

    name: str
    title: str
    size: Callable[[Config], int] | None
    roles: tuple[Role, ...]
    cuts: bool = False
    keys: tuple[str, ...] = ()
    is_open: Callable[[Config], bool] = lambda config: False


def _stages(config: Config) -> int:
    return config.pipeline.count


def _has_open_stages(config: Config) -> bool:
    """Whether a config speaks of a pipeline and says no number of stages."""
    return config.pipeline.stages == "auto" and any(path.startswith("pipeline.") for path in config.provenance)


def _experts(config: Config) -> int:
    section = config.expert_parallel
    return section.autoep_size if section.enabled else 1


def _ring(config: Config) -> int:
    return 1  # no key sizes it: `dsrun plan` alone can ask for it


def _sequence(config: Config) -> int:
    return config.sequence_parallel_size


def _tensor(config: Config) -> int:
    return config.tensor_parallel.size


def _has_open_tensor(config: Config) -> bool:
    return config.tensor_parallel.autotp_size == "auto"


#: The axes, slowest first: ranks of the last one are neighbours, and so on one host.
AXES: tuple[AxisRow, ...] = (
    AxisRow("pipe", "pipeline", _stages, ("pipe",), keys=("pipeline.stages",), is_open=_has_open_stages),
    AxisRow("data", "data parallel", None, ("replica", "batch", "shard")),
    AxisRow(
        "expert",
        "expert parallel",
        _experts,
        ("replica", "batch", "shard", "expert"),
        cuts=True,
        keys=("expert_parallel.autoep_size", "expert_parallel.enabled"),
    ),
    AxisRow("ring", "context parallel", _ring, ("replica", "shard", "context")),
    AxisRow(
        "ulysses",
        "sequence parallel",
        _sequence,
        ("replica", "shard", "context"),
        keys=("sequence_parallel_size",),
    ),
    AxisRow(
        "tensor",
        "tensor parallel",
        _tensor,
        ("replica", "tensor"),
        cuts=True,
        keys=("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
        is_open=_has_open_tensor,
    ),
)


def axes_of(config: Config, world_size: int) -> MeshSpec:
    """Returns how the ranks of a job are divided.

    Args:
        config: the config; keys of axes that this version does not build may be set, as `dsrun plan` reads them.
        world_size: ranks of the job.

    Raises:
        ConfigError: the ranks do not divide by the sizes of the axes; it stands at the key of one.
    """
    finding = misfit(config, world_size)
    if finding is not None:
        raise ConfigError(finding.problem.message, hint=finding.hint)
    return divide(world_size, sizes_of(config))


def sizes_of(config: Config) -> dict[str, int]:
    """Returns the ranks along the axes that have a size of their own, by name of the axis."""
    return {row.name: row.size(config) for row in AXES if row.size is not None}


def open_axes(config: Config) -> dict[str, str]:
    """Returns the axes whose size a config leaves to the script's model or to a plan, with the key that does."""
    return {row.name: row.keys[0] for row in AXES if row.is_open(config)}


def assumed_sizes(config: Config) -> str:
    """Returns in words what is assumed of sizes that a config leaves open; empty where it leaves none."""
    said = " and ".join(f'`{key}` "auto"' for key in open_axes(config).values())
    return f"{said} counted as 1" if said else ""


def misfit(config: Config, world_size: int) -> Finding | None:
    """Returns what is wrong where the ranks of a job do not divide by the sizes of a config's axes.

    Args:
        config: the config.
        world_size: ranks of the job.

    Returns:
        an error at the key of the first axis, slowest first, that the ranks do not divide by; None where they divide.
    """
    sizes: dict[str, int] = {}
    keys: dict[str, str] = {}
    culprit: str | None = None
    for row in AXES:
        if row.size is not None and (size := row.size(config)) > 1:
            sizes[row.name], keys[row.name] = size, _key_of(row, config, size)
            if culprit is None and not divides(world_size, sizes):
                culprit = row.name
    if culprit is None:
        return None
    said = " and ".join(
        f"`{keys[name]}` is {size}{_origin(config, keys[name])}" for name, size in sizes.items() if keys[name]
    )
    message = f"{said}; {_misfit_text(world_size, sizes)}" if said else _misfit_text(world_size, sizes)
    way_out = "a size that divides" if len(sizes) == 1 else "sizes whose product divides"
    hint = f"{_multiple_text(sizes)}, or {way_out} {world_size}"
    at = config.provenance[keys[culprit]].position or Position(config.source)
    return Finding(Severity.ERROR, Code.BAD_VALUE, keys[culprit], message, hint, at)


def wide_keys(config: Config) -> tuple[str, ...]:
    """Returns the dotted keys of the axes that a config makes several ranks wide."""
    return tuple(key for row in AXES if row.size is not None and row.size(config) > 1 for key in row.keys)


def divide(world_size: int, sizes: Mapping[str, int]) -> MeshSpec:
    """Returns a grid of so many ranks.

    Args:
        world_size: ranks of the job.
        sizes: ranks along the axes that have a size of their own, by name; 1 where one is not named.

    Raises:
        ConfigError: the ranks do not divide by the sizes.
    """
    given = prod(sizes.values())
    if not divides(world_size, sizes):
        raise ConfigError(_misfit_text(world_size, sizes), hint=_multiple_text(sizes))
    sizes = {row.name: world_size // given if row.size is None else sizes.get(row.name, 1) for row in AXES}
    return MeshSpec(tuple(Axis(row.name, sizes[row.name], row.roles, row.cuts) for row in AXES))


def divides(world_size: int, sizes: Mapping[str, int]) -> bool:
    """Whether so many ranks divide by the sizes of the axes that have one of their own."""
    return world_size % prod(sizes.values()) == 0


def division_text(spec: MeshSpec) -> str:
    """Returns where the number of ranks with samples of their own comes from, as `8 ranks / tensor parallel 2`."""
    batch = spec.role_axes("batch")
    others = {axis.name: axis.size for axis in spec.axes if axis.name not in batch and axis.size > 1}
    if not others:
        return f"all {spec.world_size} ranks" if spec.world_size > 1 else "1 rank"
    return f"{spec.world_size} ranks / {_product(others)}"


def coordinate_text(spec: MeshSpec, rank: int) -> str:
    """Returns where a rank stands on the axes with several ranks, as `data 1, tensor 0`.

    Empty where data parallelism is all there is: the rank's number says it.

    Args:
        spec: the grid.
        rank: number of the rank.
    """
    names = spec.wide([axis.name for axis in spec.axes])
    if all(row.size is None for row in AXES if row.name in names):
        return ""
    here = spec.coordinate(rank)
    return ", ".join(f"{name} {here[name]}" for name in names)


def _key_of(row: AxisRow, config: Config, size: int) -> str:
    """Returns the key that gives an axis its size; empty where no key of the config does."""
    for key in row.keys:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value == size:
            return key
    return ""


def _origin(config: Config, key: str) -> str:
    """Returns who has said a size that does not stand in the config, in brackets."""
    source = config.provenance[key]
    return f" ({source.detail})" if source.kind is Kind.DERIVED and source.detail else ""


def _misfit_text(world_size: int, sizes: Mapping[str, int]) -> str:
    ranks = "1 rank does" if world_size == 1 else f"{world_size} ranks do"
    return f"{ranks} not divide by {_product(sizes)}"


def _multiple_text(sizes: Mapping[str, int]) -> str:
    return f"use a multiple of {prod(sizes.values())} ranks"


def _product(sizes: Mapping[str, int]) -> str:
    """Returns the sizes of axes as a product in words, without those of 1."""
    titles = {row.name: row.title for row in AXES}
    return " x ".join(f"{titles[name]} {size}" for name, size in sizes.items() if size > 1)
