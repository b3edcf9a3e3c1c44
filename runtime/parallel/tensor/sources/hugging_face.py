"""The plan that a model of transformers brings along, as styles: rules by name, with `*` for a layer's number.

The names of the styles are those of `ParallelInterface` in transformers/distributed/tensor_parallel.py, of 5.x all
versions. Nothing of transformers is imported: a model has its plan in `tp_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from dsrun.errors import ModelError, Problem
from dsrun.units import format_names

from ..styles import COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW, WHOLE, Form, ModelPlan, Style

_STYLES: Mapping[str, Style] = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "colwise_gather_output": GATHERED_COLUMN,
    "colwise_rep": GATHERED_COLUMN,
    "rowwise_split_input": SPLIT_ROW,
    "rowwise_rep": SPLIT_ROW,
    "packed_colwise": Style(Form.COLUMN, parts=2),
    "packed_rowwise": Style(Form.ROW, parts=2),
    "embedding_rowwise": Style(Form.VOCABULARY),
    "embedding_colwise": Style(Form.HIDDEN, gathers_output=True),
    "moe_tp_experts": Style(Form.EXPERTS),
    "moe_identity_expert": Style(Form.DIVIDED_INPUT),
    "replicated_with_grad_allreduce": Style(Form.PARTIAL_GRADIENT),
    "mla_kv_a_proj": Style(Form.SHARED_TAIL),
    "all_reduce": Style(Form.SUMMED_OUTPUT),
    **dict.fromkeys(("replicate", "replicated", "local", "local_params"), WHOLE),
}
#: Styles of the same dictionary that divide something else than layers.
_OTHER_AXES: Mapping[str, str] = {
    "sequence_parallel": "cuts activations along the sequence",
    **dict.fromkeys(
        ("grouped_gemm", "ep_router", "ep_dispatch_experts", "megamoe_router", "megamoe_experts"),
        "spreads experts over ranks",
    ),
}
_HINT = "write the layers' rules in `tensor_parallel.partition_config`"


def plan_of(model: nn.Module) -> ModelPlan | None:
    """Returns the plans of the Hugging Face models in `model`, the model itself most often; None where none has one.

    Rules that name nothing in the model are left out: plans are of a family, with and without experts.

    Args:
        model: any model; only names, classes and the configuration are read.

    Raises:
        ModelError: naming each style that is not known, or is not one of layers that are cut.
    """
    modules: dict[str, Style] = {}
    parameters: dict[str, Style] = {}
    classes: list[str] = []
    problems: list[Problem] = []
    for prefix, owner, rules in _plans_in(model):
        classes.append(type(owner).__name__)
        problems += _problems(type(owner).__name__, rules)
        if problems:
            continue
        for name, module in owner.named_modules():
            for key, _ in module.named_parameters(recurse=False):
                full = f"{name}.{key}" if name else key
                if (rule := _rule_for(full, rules)) is not None:
                    parameters[prefix + full] = _STYLES[rule]
            rule = _rule_for(name, rules)
            if rule is not None:
                modules[prefix + name] = _style_of(module, _STYLES[rule], owner)
    if problems:
        raise ModelError.of(problems)
    if not classes:
        return None
    for name, style in modules.items():
        if style.form is Form.SUMMED_OUTPUT and any(full.rpartition(".")[0] == name for full in parameters):
            # Its input and its routing weights are whole, so their gradients are summed too.
            modules[name] = Style(Form.EXPERTS)
    forms: dict[str, set[Form]] = {}
    for full, style in parameters.items():
        forms.setdefault(full.rpartition(".")[0], set()).add(style.form)
    for name, found in forms.items():
        if name not in modules and found >= {Form.COLUMN, Form.ROW}:
            modules[name] = Style(Form.EXPERTS)  # columns with rows behind them give sums, said or not
    return ModelPlan(f"{' and '.join(dict.fromkeys(classes))}.tp_plan", modules, parameters)


def _plans_in(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Yields the outermost modules with a plan: (what stands before their names, the module, its rules)."""
    # Asked of the class, for wrappers hand on the attributes of what they wrap, and names begin elsewhere there.
    rules: Any = getattr(module, "tp_plan", None) if hasattr(type(module), "tp_plan") else None
    if isinstance(rules, Mapping) and rules:
        yield prefix, module, rules
        return
    for name, child in module.named_children():
        yield from _plans_in(child, f"{prefix}{name}.")


def _problems(owner: str, rules: Mapping[str, str]) -> Iterator[Problem]:
    """Yields one for each style that is none of layers that are cut."""
    by_style: dict[str, list[str]] = {}
    for name, style in rules.items():
        if style not in _STYLES:
            by_style.setdefault(str(style), []).append(name)
    for style, names in by_style.items():
        reason = f"{_OTHER_AXES[style]}, which is no cut of layers" if style in _OTHER_AXES else "is not known"
        yield Problem(f"model: the style `{style}` of {format_names(names, 1)} in {owner}.tp_plan {reason}", _HINT)


def _rule_for(name: str, rules: Mapping[str, str]) -> str | None:
    generic = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return rules.get(name) or rules.get(generic)


def _style_of(module: nn.Module, style: Style, owner: nn.Module) -> Style:
    """Returns the style of a module, which of an embedding has other dims than of a Linear."""
    if isinstance(module, nn.Embedding) and style.form is Form.ROW:
        return Style(Form.VOCABULARY)
    if isinstance(module, nn.Embedding) and style.form is Form.COLUMN:
        return Style(Form.HIDDEN, gathers_output=style.gathers_output)
    if style.form is Form.VOCABULARY and not any(True for _ in module.parameters(recurse=False)):
        return WHOLE  # a module around embeddings, which are named as they are: there is nothing of its own to cut
    if style.form is Form.SHARED_TAIL:
        tail = _rotated_columns(owner)
        return replace(style, tail=tail) if tail else WHOLE
    return style


def _rotated_columns(owner: Any) -> int:
    """Returns how many columns of keys take the position and go to every head at once, of latent attention."""
    config = owner.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.qk_rope_head_dim)
