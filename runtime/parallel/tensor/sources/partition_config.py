"""Rules of a config, as DeepSpeed's AutoTP has them: regular expressions over names of parameters, first match wins.

Linears and embeddings are cut as their `weight` is named; their biases go with them. Weights of three dims, which a
module of experts has, are cut by their own name, and that module with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from torch import nn

from dsrun.config.sections.parallel import LayerSpec
from dsrun.errors import ModelError, Problem

from ..styles import COLUMN, GATHERED_COLUMN, ROW, WHOLE, Form, ModelPlan, Style
from .attributes import attributes_of

#: Numbers of equal parts that a hint names.
_COUNTS = (2, 3, 4)
_HINT = "see `dsrun config explain tensor_parallel.partition_config.layer_specs.shape`"


def plan_of(model: nn.Module, specs: Sequence[LayerSpec], *, source: str, strict: bool = False) -> ModelPlan:
    """Returns the plan that rules make for a model.

    Args:
        model: any model; only names, classes, shapes and the configuration's `model_type` are read.
        specs: the rules.
        source: name of the rules in messages.
        strict: whether each Linear must have a rule.

    Raises:
        ModelError: naming each parameter that does not have the shape that its rule says, and, if `strict`, each Linear
            without a rule.
    """
    kind = model_type_of(model)
    rules = [(spec, [re.compile(one) for one in spec.patterns]) for spec in specs if _is_for(spec, kind)]
    modules: dict[str, Style] = {}
    parameters: dict[str, Style] = {}
    problems: list[Problem] = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for key, param in own.items():
            if key != "weight" and "weight" in own:
                continue  # a bias, which goes with its weight
            full = f"{name}.{key}" if name else key
            spec = next((spec for spec, patterns in rules if any(one.match(full) for one in patterns)), None)
            is_weight = key == "weight" and isinstance(module, nn.Linear | nn.Embedding)
            if spec is None:
                if strict and is_weight and isinstance(module, nn.Linear):
                    problems.append(_unmatched(full, source))
                continue
            if spec.partition_type == "skip":
                modules.setdefault(name, Style(Form.PARTIAL_GRADIENT) if spec.grad_allreduce else WHOLE)
                continue
            is_of_experts = param.dim() > 2 and not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            if not is_weight and not is_of_experts and not _is_transposed(module, key):
                continue  # a norm, or a number for each column
            try:
                style = _style(spec, tuple(param.shape), is_embedding=isinstance(module, nn.Embedding))
            except ValueError as error:
                shape = list(param.shape)
                hint = _HINT if isinstance(module, nn.Embedding) else _fitting(spec, shape)
                problems.append(Problem(f"model: `{full}` is {shape}, and its rule of {source} {error}", hint))
                continue
            if is_of_experts:
                modules[name], parameters[full] = Style(Form.EXPERTS), style
            else:
                modules[name] = style
    if problems:
        raise ModelError.of(problems)
    _share_rotated_keys(model, modules)
    return ModelPlan(source, modules, parameters, attributes_of(model, modules))


def _share_rotated_keys(model: nn.Module, modules: dict[str, Style]) -> None:
    """Marks layers of latent attention that rules leave whole, where some columns go to cut heads at once."""
    for name in [name for name, style in modules.items() if style.form is Form.COLUMN and name.endswith(".kv_b_proj")]:
        parent = name.removesuffix(".kv_b_proj")
        whole = f"{parent}.kv_a_proj_with_mqa"
        tail = getattr(model.get_submodule(parent), "qk_rope_head_dim", None)
        if isinstance(tail, int) and tail and modules.get(whole, WHOLE) == WHOLE and _has(model, whole):
            modules[whole] = Style(Form.SHARED_TAIL, tail=tail)


def _has(model: nn.Module, name: str) -> bool:
    parent, _, child = name.rpartition(".")
    return child in dict(model.get_submodule(parent).named_children())


def model_type_of(model: nn.Module) -> str | None:
    """Returns the `model_type` of the first configuration in a model, in lower case; None where there is none."""
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(kind, str) and kind:
            return kind.lower()
    return None


def _is_for(spec: LayerSpec, kind: str | None) -> bool:
    return spec.model_types is None or kind in [one.lower() for one in spec.model_types]


def _is_transposed(module: nn.Module, key: str) -> bool:
    """Whether it is the weight of transformers' Conv1D, a Linear whose weight is [inputs, outputs]."""
    return key == "weight" and type(module).__name__ == "Conv1D"


def _unmatched(full: str, source: str) -> Problem:
    hint = 'add a pattern for it, "partition_type": "skip" to leave it whole, or leave out `strict_mode`'
    return Problem(f"model: no rule of {source} matches `{full}`, and `strict_mode` is true", hint)


def _style(spec: LayerSpec, shape: tuple[int, ...], *, is_embedding: bool) -> Style:
    """Returns the style of a weight of some shape.

    Raises:
        ValueError: the rule's shape is not one of the weight; the text says why.
    """
    is_row = spec.partition_type == "row"
    if not is_embedding:
        style = ROW if is_row else GATHERED_COLUMN if spec.gather_output else COLUMN
        return replace(style, parts=_parts(spec, shape, is_row=is_row))
    # [tokens, columns]: an embedding's inputs are its tokens.
    if spec.shape is not None or spec.partition_dim not in (None, 0 if is_row else 1):
        raise ValueError("has a `shape` or a `partition_dim`, which an embedding's cannot have")
    return Style(Form.VOCABULARY) if is_row else Style(Form.HIDDEN, gathers_output=spec.gather_output)


def _parts(spec: LayerSpec, shape: tuple[int, ...], *, is_row: bool) -> int | tuple[int, ...]:
    """Returns what stands side by side in the dim of a weight that is cut.

    Raises:
        ValueError: the shape of the rule is not one of the weight; the text says why.
    """
    stacked, (outputs, inputs) = len(shape) - 2, shape[-2:]
    view = spec.shape or shape
    dim = spec.partition_dim
    if stacked and len(view) == len(shape):  # experts before the weight's own two dims
        if any(view[place] not in (-1, shape[place]) for place in range(stacked)):
            raise ValueError(f"has shape {_shown(view)}")
        view, dim = view[stacked:], None if dim is None else dim - stacked
    if dim is None:
        dim = 1 if is_row else 0
    kind = "row" if is_row else "column"
    if not 0 <= dim < len(view):
        raise ValueError(f"cuts dim {dim} of {_shown(view)}")
    if (dim == len(view) - 1) != is_row:
        raise ValueError(f"cuts {'outputs' if is_row else 'inputs'} as a {kind}")
    lengths = _filled(view, dim, outputs, inputs)
    item = view[dim]
    if isinstance(item, tuple):
        each = item
    elif item > 0 and spec.shape is not None:
        if lengths[dim] % item:
            raise ValueError(f"asks for {item} equal parts of {lengths[dim]}")
        each = (lengths[dim] // item,) * item
    else:
        each = (lengths[dim],)
    inner = 1 if is_row else prod(lengths[dim + 1 : -1])
    outer = 1 if is_row else prod(lengths[:dim])
    found = [one * inner for one in each] * outer
    return len(found) if len(set(found)) == 1 else tuple(found)


def _fitting(spec: LayerSpec, shape: Sequence[int]) -> str:
    """Returns a hint with shapes that a rule may have for a weight."""
    is_row = spec.partition_type == "row"
    length = shape[-1 if is_row else -2]

    def written(item: int | list[int]) -> str:
        return str([-1, item] if is_row else [item, -1])

    counts = [count for count in _COUNTS if length % count == 0]
    equal = f"{', '.join(written(count) for count in counts)} for equal parts side by side; " if counts else ""
    unlike = written([length - length // 3, length // 3])
    return (
        f'of its {length} {"inputs" if is_row else "outputs"} these are a "shape", without `partition_dim`: {equal}'
        f"{unlike} for lengths of your own that add up to {length}; none where nothing stands side by side; {_HINT}"
    )


def _filled(view: Sequence[int | tuple[int, ...]], dim: int, outputs: int, inputs: int) -> list[int]:
    """Returns the lengths of a rule's shape with those that it leaves open: -1s, and a number of equal parts."""
    lengths = [
        sum(item) if isinstance(item, tuple) else -1 if place == dim else item for place, item in enumerate(view)
    ]
    if len(view) < 2:
        raise ValueError(f"has shape {_shown(view)}")
    if lengths[-1] == -1:
        lengths[-1] = inputs
    unknown = [place for place, length in enumerate(lengths[:-1]) if length == -1]
    known = prod(length for length in lengths[:-1] if length != -1)
    if len(unknown) == 1 and outputs % known == 0:
        lengths[unknown[0]] = outputs // known
    if prod(lengths[:-1]) != outputs or lengths[-1] != inputs or -1 in lengths:
        raise ValueError(f"has shape {_shown(view)}")
    return lengths


def _shown(view: Sequence[int | tuple[int, ...]]) -> str:
    return str([list(item) if isinstance(item, tuple) else item for item in view])
