"""Modules that look like others and hold none of their weights: to run a block with other values than its own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

from torch import Tensor, nn


def twin_of(module: nn.Module, *, with_tensors: bool, known: dict[int, nn.Module] | None = None) -> nn.Module:
    """Returns a module that looks like another: class, plain attributes and parts, but no parameters and no hooks.

    It is in evaluation, so that dropout in it draws no random numbers.

    Args:
        module: module that is copied.
        with_tensors: whether buffers, which are shared with the module, and other tensors are kept.
        known: copies made so far, by the id of their module; filled.
    """
    known = {} if known is None else known
    if id(module) in known:
        return known[id(module)]
    twin = object.__new__(type(module))
    known[id(module)] = twin
    source: dict[str, Any] = module.__dict__
    state: dict[str, Any] = {}
    for name, value in source.items():
        if isinstance(value, dict) and "hook" in name and name.startswith("_"):
            state[name] = OrderedDict[int, Any]()
        elif getattr(value, "__self__", None) is not module and _may_stay(value, with_tensors=with_tensors):
            state[name] = value
    buffers: dict[str, Any] = source["_buffers"]
    state["_parameters"] = dict.fromkeys(source["_parameters"])
    state["_buffers"] = buffers if with_tensors else dict.fromkeys(buffers)
    state["_modules"] = {
        name: None if child is None else twin_of(child, with_tensors=with_tensors, known=known)
        for name, child in source["_modules"].items()
    }
    state["training"] = False
    state["_compiled_call_impl"] = None
    twin.__dict__.update(state)
    return twin


def _may_stay(value: Any, *, with_tensors: bool) -> bool:
    """Whether an attribute keeps no parameters alive."""
    if isinstance(value, nn.Module | nn.Parameter):
        return False
    if isinstance(value, Tensor):
        return with_tensors
    if isinstance(value, list | tuple | set | frozenset):
        return all(_may_stay(item, with_tensors=with_tensors) for item in cast("list[Any]", value))
    if isinstance(value, dict):
        return all(_may_stay(item, with_tensors=with_tensors) for item in cast("dict[Any, Any]", value).values())
    return True
