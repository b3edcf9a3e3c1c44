"""The output layer, which makes logits of the vocabulary, and the embedding that may have the same weight.

A weight of two modules is one parameter, so both are cut alike or both are whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from dsrun.errors import ModelError

from ....stacks import block_prefixes
from ..styles import GATHERED_COLUMN, SPLIT_ROW, WHOLE, Form, ModelPlan, Style

_KEY = "tensor_parallel.vocab_parallel_lm_head"
_PATTERNS = "tensor_parallel.partition_config.lm_head_patterns"
_SPECS = "tensor_parallel.partition_config.layer_specs"


def cut_output_layer(model: nn.Module, plan: ModelPlan, patterns: Sequence[str]) -> ModelPlan:
    """Returns a plan that cuts the output layer over the vocabulary, as `vocab_parallel_lm_head` asks.

    Args:
        model: any model.
        plan: the plan without it.
        patterns: last parts of names that an output layer may have, see `find_output_layer`.

    Raises:
        ModelError: the model has no output layer that can be cut so, or several.
    """
    name = find_output_layer(model, patterns)
    return replace(plan, modules={**plan.modules, name: GATHERED_COLUMN})


def find_output_layer(model: nn.Module, patterns: Sequence[str]) -> str:
    """Returns the qualified name of the Linear that makes the logits.

    Args:
        model: any model; one of transformers says which it is.
        patterns: last parts of names that it may have in others.

    Raises:
        ModelError: there is none, or there are several.
    """
    ask: Any = getattr(model, "get_output_embeddings", None)
    said = ask() if callable(ask) else None
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = [name for name, module in linears if module is said]
    found = found or [name for name, _ in linears if name.rpartition(".")[2] in patterns]
    if len(found) == 1:
        return found[0]
    raise ModelError(f"`{_KEY}` is true, and the model has {_count(found, patterns)}", hint=_hint(model, found))


def _count(found: Sequence[str], patterns: Sequence[str]) -> str:
    if found:
        return f"{len(found)} output layers: " + ", ".join(f"`{name}`" for name in found)
    return "no Linear called " + " or ".join(f"`{pattern}`" for pattern in patterns)


def _hint(model: nn.Module, found: Sequence[str]) -> str:
    """Returns how to say which Linear it is: by a last part of a name that no other has, where there is one."""
    blocks = block_prefixes(model)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    last = Counter(name.rpartition(".")[2] for name in linears)
    choices = [name for name in found or linears if not name.startswith(blocks)]
    ends = list(dict.fromkeys(end for name in choices if last[end := name.rpartition(".")[2]] == 1))
    if ends:
        return f"write which one it is: `{_PATTERNS}`: {json.dumps(ends[-1:])}, or leave out `{_KEY}`"
    if choices:
        return f'leave out `{_KEY}`, and cut one by a rule of `{_SPECS}`, a "column" with "gather_output": true'
    return f"leave out `{_KEY}`: a Linear outside of the repeated blocks would make the logits"


def align_ties(model: nn.Module, plan: ModelPlan) -> ModelPlan:
    """Returns a plan in which modules that have one weight are cut alike; where some cannot be, all are whole.

    Args:
        model: any model.
        plan: the plan as its source says it.
    """
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for param in (param for param in module.parameters(recurse=False) if param.dim() > 1):
            owners.setdefault(id(param), []).append((name, module))
    modules = dict(plan.modules)
    for group in owners.values():
        if len(group) > 1 and any(_own_weight(module) for _, module in group):
            modules.update(_alike(group, modules))
    return replace(plan, modules=modules)


def _own_weight(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def _alike(group: Sequence[tuple[str, nn.Module]], modules: dict[str, Style]) -> dict[str, Style]:
    """Returns the styles of modules that have one parameter; empty where none of them is cut."""
    given = [
        (module, modules[name]) for name, module in group if name in modules and _dim_of(modules[name]) is not None
    ]
    if not given:
        return {}
    if not all(_own_weight(module) for _, module in group):
        return {name: WHOLE for name, _ in group}
    # The output layer's style counts: an embedding gives the same whether tokens or columns are cut.
    leader = next((style for module, style in given if isinstance(module, nn.Linear)), given[0][1])
    dim = _dim_of(leader)
    found: dict[str, Style] = {}
    for name, module in group:
        own = modules.get(name, WHOLE)
        if isinstance(module, nn.Linear):
            fitting = own if _dim_of(own) == dim else GATHERED_COLUMN if dim == 0 else SPLIT_ROW
        else:
            fitting = own if _dim_of(own) == dim else Style(*_OF_EMBEDDING[dim == 0])
        found[name] = replace(fitting, parts=leader.parts)
    return found


#: Form and whether outputs are gathered, of an embedding whose columns (False) or tokens (True) are cut.
_OF_EMBEDDING = {False: (Form.HIDDEN, True), True: (Form.VOCABULARY, False)}


def _dim_of(style: Style) -> int | None:
    """Returns the dim of a weight [outputs, inputs] or [tokens, columns] that a style cuts; None for none."""
    if style.form in (Form.COLUMN, Form.VOCABULARY):
        return 0
    return 1 if style.form in (Form.ROW, Form.HIDDEN) else None
