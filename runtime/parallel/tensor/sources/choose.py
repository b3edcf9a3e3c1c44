"""Which source of a plan counts for a model.

What a user wrote comes first: `partition_config`, then `preset_model`. Then what the model brings along, then the rules
of a known model of its type, then the names of layers. No plan is believed, see `comparison/`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from torch import nn

from dsrun.config.sections.parallel import PartitionConfig, TensorParallel
from dsrun.errors import ModelError, Problem

from ....stacks import block_prefixes, find_stacks
from ..styles import Form, ModelPlan
from . import heuristics, hugging_face, partition_config, presets
from .output_layer import align_ties, cut_output_layer

_RULES = "tensor_parallel.partition_config"
_CUTTING = (Form.COLUMN, Form.ROW, Form.EXPERTS)
#: Kinds of layers that a hint names.
_MOST_LAYERS = 16


def find_plan(model: nn.Module, section: TensorParallel, size: int) -> ModelPlan:
    """Returns how a model is cut over ranks.

    Args:
        model: the model, whose parameters may be on the meta device: only names, classes and shapes are read.
        section: the config.
        size: ranks that share a layer.

    Raises:
        ModelError: there is no plan for the model, or a rule of one fits no layer; the hint has rules to look through.
            Or a layer outside of the repeated blocks gives or takes parts, and no other does.
    """
    rules = section.partition_config or PartitionConfig()
    plan = _written(model, section, rules) or _found(model)
    if plan is None or not any(style.form in _CUTTING for style in plan.modules.values()):
        raise _nothing(model, size, None if plan is None else plan.source)
    _check_pairs(model, plan)
    if section.vocab_parallel_lm_head:
        plan = cut_output_layer(model, plan, rules.lm_head_patterns)
    return align_ties(model, plan)


def _written(model: nn.Module, section: TensorParallel, rules: PartitionConfig) -> ModelPlan | None:
    """Returns the plan that the config has; None where it leaves that to the model."""
    preset = presets.rules_of(section.preset_model) if section.preset_model is not None else ()
    if rules == PartitionConfig():
        source = f'`tensor_parallel.preset_model` "{section.preset_model}"'
        return partition_config.plan_of(model, preset, source=source) if preset else None
    specs = (*rules.layer_specs, *preset) if rules.use_default_specs else rules.layer_specs
    return partition_config.plan_of(model, specs, source=f"`{_RULES}`", strict=rules.strict_mode)


def _found(model: nn.Module) -> ModelPlan | None:
    """Returns the plan that the model brings along, or that its type or its names lead to."""
    own = hugging_face.plan_of(model)
    if own is not None and _is_of_blocks(model, own):
        return own
    kind = partition_config.model_type_of(model)
    plan = None
    if kind in presets.NAMES:
        plan = partition_config.plan_of(model, presets.rules_of(kind), source=f'rules of model type "{kind}"')
    if plan is None or not any(style.form in _CUTTING for style in plan.modules.values()):
        plan = heuristics.plan_of(model)
    if plan is None or own is None:
        return plan
    # Some families have a plan of their output layer alone.
    return replace(plan, modules={**own.modules, **plan.modules}, parameters={**own.parameters, **plan.parameters})


def _is_of_blocks(model: nn.Module, plan: ModelPlan) -> bool:
    """Whether a plan cuts something in the repeated blocks of a model; true of a model that has none."""
    blocks = block_prefixes(model)
    cut = [name for name, style in plan.modules.items() if style.form in _CUTTING]
    return not blocks or any(name.startswith(blocks) for name in cut)


def _check_pairs(model: nn.Module, plan: ModelPlan) -> None:
    """Refuses layers outside of the repeated blocks that give parts which none there takes, or take what none gives.

    Where a model has no repeated blocks nothing is said: all of its layers are outside.
    """
    blocks = block_prefixes(model)
    outside = {name: style for name, style in plan.modules.items() if not name.startswith(blocks)} if blocks else {}
    gives = [name for name, one in outside.items() if one.form in (Form.COLUMN, Form.HIDDEN) and not one.gathers_output]
    takes = [name for name, one in outside.items() if one.form is Form.ROW and not one.splits_input]
    if bool(gives) == bool(takes):
        return
    said = (
        "gives each rank a part of its outputs, and no row takes them"
        if gives
        else ("takes a part of its inputs on each rank, and no column gives them")
    )
    hint = f'in `{_RULES}`, let it be a "column" with "gather_output": true, which gives whole outputs, or "skip" it'
    raise ModelError.of(
        [
            Problem(
                f"model: `{name}` ({type(model.get_submodule(name)).__name__}) {said} (plan of {plan.source})", hint
            )
            for name in gives or takes
        ]
    )


def _nothing(model: nn.Module, size: int, source: str | None) -> ModelError:
    """Returns the error of a model that nothing says how to cut, with rules to fill in."""
    kinds = _layers_in(model)
    names = ", ".join(f"`{name}`" for name in [*kinds][:4]) + (", ..." if len(kinds) > 4 else "")
    kind = type(model).__name__
    if not kinds:
        what = f"the model ({kind}) has no Linear in a repeated block"
    else:
        what = f"the model ({kind}) has no plan, and the names of its layers lead to none: {names}"
    if source is not None:
        what = f"{source} cuts no layer of the model ({kind})" + (f", which has {names}" if kinds else "")
    conv = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if type(part).__name__ == "Conv1D"})
    if conv:
        layers = ", ".join(f"`{name}`" for name in conv)
        what += f"; {layers} are Conv1D, whose weights are [inputs, outputs], which is not built yet"
    shown = [*kinds.items()][:_MOST_LAYERS]
    specs = [{"patterns": [_pattern(name)], **guess} for name, guess in shown]
    more = f"; and so on for {len(kinds) - _MOST_LAYERS} more" if len(kinds) > _MOST_LAYERS else ""
    hint = (
        "say what is a column and what the row behind it; the types here are guesses from names, lengths and order, to "
        "be looked at; patterns match from the beginning of a parameter's name: "
        f'"tensor_parallel": {{"autotp_size": {size}, "partition_config": {json.dumps({"layer_specs": specs})}}}{more}'
        if kinds
        else 'leave out "tensor_parallel"'
    )
    return ModelError(f"model: cannot be cut over {size} ranks: {what}", hint=hint)


def _layers_in(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the Linears of blocks, with `*` for their numbers, and what each is likely to be."""
    found: dict[str, dict[str, Any]] = {}
    for stack in find_stacks(model, skip=lambda _: False):
        for name, block in stack.blocks:
            for one, kind in heuristics.guesses_in(block, name).items():
                found.setdefault(".".join("*" if part.isdigit() else part for part in one.split(".")), kind)
    return found


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\*", r"\d+") + r"\.weight$"
