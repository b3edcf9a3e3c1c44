"""A model built on the meta device gets its values module by module, cut at once: no rank ever holds it whole.

[Note: values of a meta model]
Each module that has parameters of its own draws them in its `reset_parameters` (or `_reset_parameters`, as torch's
attention calls it), children before parents: the order in which modules draw when they are built. So the values are
those of an ordinary construction with the same seed, provided that all its values come from these methods, that none
is drawn again later (`model.apply(init)`), and that no weight is tied, for the tied module's own draw is left out.
`zero.Init` has no such conditions. Values that `load_pretrained` has promised are not drawn.

Where a pipeline has cut the model, each module draws from a seed of its own, made of one seed of the whole job and the
module's name: its values do not depend on what other ranks have, nor on their seeds. They are then not those of an
ordinary construction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils import swap_tensors

from dsrun.errors import ModelError, Problem

from ...layout.cuts import NO_CUTS, Cuts, placement_of
from ..access.state_dicts import watch_state_dicts
from ..partition_parameters import home_of
from .construct import WholeDuringCalls
from .unbuilt import UnbuiltParameters
from .values import check_parts_are_here


def materialise(model: nn.Module, nursery: UnbuiltParameters, *, cuts: Cuts = NO_CUTS, seed: int | None = None) -> None:
    """Gives all meta parameters values, and takes them into `nursery`; every rank must call.

    A parameter stays the same object. One module's parameters are whole at a time.

    Args:
        model: the model; parameters and buffers that are not on the meta device stay as they are.
        nursery: nursery that keeps the slices.
        cuts: parameters that an axis beside data has changed.
        seed: seed of the job, by which and its name each module draws; None: all draw one after the other.

    Raises:
        ModelError: naming every tensor that no method gives values to, or every one of which a rank has a part, for a
            method would give all ranks the same values.
    """
    owners = list(_owners(model))
    params = [(name, param, placement_of(param, cuts)) for name, param in model.named_parameters()]
    check_parts_are_here(params)
    _check(model, owners)
    with WholeDuringCalls(nursery):  # a parent may set its children's once more
        for prefix, module, names in owners:
            reset = _reset_of(module)
            assert reset is not None, "checked above"
            if seed is None:
                _fill(prefix, module, names, reset, nursery)
                continue
            with torch.random.fork_rng(devices=[nursery.device] if nursery.device.type == "cuda" else []):
                torch.manual_seed(_seed_of(prefix, seed))
                _fill(prefix, module, names, reset, nursery)
    watch_state_dicts(model)


def has_meta(model: nn.Module) -> bool:
    """Whether a tensor of the model is on the meta device and nobody has promised its values."""
    return any(param.is_meta and home_of(param) is None for param in model.parameters()) or any(
        buffer.is_meta for buffer in model.buffers()
    )


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yields (prefix, module, names of its meta parameters), children first, each parameter at its first owner."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, list[str]]]:
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}{name}.")
        own: list[str] = []
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta and home_of(param) is None and id(param) not in seen:
                seen.add(id(param))
                own.append(name)
        if own or any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            yield prefix, module, own

    yield from walk(model, "")


def _seed_of(prefix: str, seed: int) -> int:
    """Returns the seed of a module's values, by the job's seed and the module's name."""
    text = f"{seed} {prefix}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _check(model: nn.Module, owners: list[tuple[str, nn.Module, list[str]]]) -> None:
    problems = [
        Problem(
            f"model: `{prefix}{name}` is on the meta device, and {type(module).__name__} has no reset_parameters",
            "give the module a reset_parameters method, load values with dsrun.zero.load_pretrained, or build the "
            "model inside dsrun.zero.Init instead of on the meta device",
        )
        for prefix, module, names in owners
        if _reset_of(module) is None
        for name in [*names, *(name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta)]
    ]
    if problems:
        raise ModelError.of(problems)


def _fill(
    prefix: str, module: nn.Module, names: list[str], reset: Callable[[], object], nursery: UnbuiltParameters
) -> None:
    stand_ins: dict[str, nn.Parameter] = {}
    for name, param in list(module.named_parameters(recurse=False)):
        if name in names:
            values = torch.full_like(param, float("nan"), device=nursery.device, requires_grad=False)
            swap_tensors(param, nn.Parameter(values, requires_grad=param.requires_grad))
        elif param.is_meta or home_of(param) is not None:  # what the method draws for it is of no use
            stand_ins[name] = param
            module.register_parameter(name, nn.Parameter(torch.empty_like(param, device=nursery.device)))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            module.register_buffer(
                name,
                torch.zeros_like(buffer, device=nursery.device)
                if not buffer.is_floating_point()
                else torch.full_like(buffer, float("nan"), device=nursery.device),
                persistent=name not in module._non_persistent_buffers_set,  # pyright: ignore[reportPrivateUsage]
            )
    with torch.no_grad():
        reset()
    for name, param in stand_ins.items():
        module.register_parameter(name, param)
    given = dict(module.named_parameters(recurse=False))
    tensors = {**{name: given[name] for name in names}, **dict(module.named_buffers(recurse=False))}
    left = [name for name, t in tensors.items() if t.is_floating_point() and bool(t.isnan().any())]
    if left:
        raise ModelError.of(
            [
                Problem(
                    f"model: `{prefix}{name}` was on the meta device, and {type(module).__name__}'s reset_parameters "
                    "does not fill it",
                    "fill it there, or build the model inside dsrun.zero.Init instead of on the meta device",
                )
                for name in left
            ]
        )
    nursery.take([(f"{prefix}{name}", given[name]) for name in names])
