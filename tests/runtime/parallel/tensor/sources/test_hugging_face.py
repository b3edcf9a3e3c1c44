"""Every plan that transformers ships becomes styles; what is unknown, or divides something else, is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsrun.config.sections.parallel import TensorParallel
from dsrun.errors import ModelError
from dsrun.runtime.parallel.tensor.sources import hugging_face
from dsrun.runtime.parallel.tensor.sources.choose import find_plan
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW, WHOLE, Form, ModelPlan, Style
from support.decoder_families import NO_DECODER, configurations, tiny

SECTION = TensorParallel(autotp_size=2)


class Planned(nn.Module):
    """What a model of transformers is to a reader of its plan."""

    def __init__(self, rules: dict[str, str], **children: nn.Module) -> None:
        super().__init__()
        self.rules = rules
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(qk_rope_head_dim=4))
        for name, child in children.items():
            self.add_module(name, child)

    @property
    def tp_plan(self) -> dict[str, str]:
        return self.rules


class Experts(nn.Module):
    """Experts in two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
        self.down_proj = nn.Parameter(torch.zeros(2, 4, 4))


def plan_of(rules: dict[str, str], **children: nn.Module) -> ModelPlan:
    plan = hugging_face.plan_of(Planned(rules, **children))
    assert plan is not None
    return plan


def tiny_of(name: str) -> Any:
    with torch.device("meta"):
        return tiny(configurations()[name])


@pytest.mark.parametrize(
    ("rule", "style"),
    [
        ("colwise", COLUMN),
        ("rowwise", ROW),
        ("colwise_gather_output", GATHERED_COLUMN),
        ("colwise_rep", GATHERED_COLUMN),
        ("rowwise_split_input", SPLIT_ROW),
        ("rowwise_rep", SPLIT_ROW),
        ("packed_colwise", Style(Form.COLUMN, parts=2)),
        ("packed_rowwise", Style(Form.ROW, parts=2)),
        ("replicated_with_grad_allreduce", Style(Form.PARTIAL_GRADIENT)),
        ("mla_kv_a_proj", Style(Form.SHARED_TAIL, tail=4)),
        ("moe_identity_expert", Style(Form.DIVIDED_INPUT)),
        ("all_reduce", Style(Form.SUMMED_OUTPUT)),
        ("local_params", WHOLE),
    ],
)
def test_a_rule_is_a_style(rule: str, style: Style) -> None:
    assert plan_of({"layer": rule}, layer=nn.Linear(4, 4)).modules == {"layer": style}


@pytest.mark.parametrize(
    ("rule", "style"),
    [
        ("embedding_rowwise", Style(Form.VOCABULARY)),
        ("rowwise", Style(Form.VOCABULARY)),
        ("rowwise_split_input", Style(Form.VOCABULARY)),
        ("colwise", Style(Form.HIDDEN)),
        ("embedding_colwise", Style(Form.HIDDEN, gathers_output=True)),
        ("colwise_gather_output", Style(Form.HIDDEN, gathers_output=True)),
    ],
)
def test_of_an_embedding_rows_are_tokens(rule: str, style: Style) -> None:
    assert plan_of({"embed": rule}, embed=nn.Embedding(8, 4)).modules == {"embed": style}


def test_all_styles_that_transformers_knows_are_known() -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    names = list(ALL_PARALLEL_STYLES.keys())
    assert len(names) >= 20
    refused: set[str] = set()
    for name in names:
        try:
            plan_of({"layer": name}, layer=nn.Linear(4, 4))
        except ModelError:
            refused.add(name)
    assert refused == {
        *("sequence_parallel", "grouped_gemm", "ep_router", "ep_dispatch_experts", "megamoe_router", "megamoe_experts")
    }


def test_each_style_that_is_not_known_is_refused_with_the_layers_that_have_it() -> None:
    rules = {"a": "diagonal", "b": "diagonal", "c": "sequence_parallel", "d": "colwise"}
    with pytest.raises(ModelError) as error:
        hugging_face.plan_of(Planned(rules))
    assert [problem.message for problem in error.value.problems] == [
        "model: the style `diagonal` of `a` and 1 more in Planned.tp_plan is not known",
        "model: the style `sequence_parallel` of `c` in Planned.tp_plan cuts activations along the sequence, which is "
        "no cut of layers",
    ]
    assert error.value.hint == "write the layers' rules in `tensor_parallel.partition_config`"


def test_a_star_is_a_layers_number_and_nothing_else() -> None:
    layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 4), "w2": nn.Linear(4, 4)}) for _ in range(11))
    plan = plan_of({"layers.*.up": "colwise", "layers.*.*": "rowwise", "layer": "rowwise"}, layers=layers)
    assert plan.modules == {f"layers.{place}.up": COLUMN for place in range(11)}


def test_a_rule_may_name_a_parameter_beside_its_module() -> None:
    rules = {"experts": "moe_tp_experts", "experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"}
    plan = plan_of(rules, experts=Experts())
    assert plan.modules == {"experts": Style(Form.EXPERTS)}
    assert plan.parameters == {"experts.gate_up_proj": Style(Form.COLUMN, parts=2), "experts.down_proj": ROW}


def test_a_sum_over_a_module_of_cut_parameters_is_that_of_experts() -> None:
    """Gradients of what goes in are parts as well, which the style's name does not say."""
    rules = {"experts": "all_reduce", "experts.gate_up_proj": "colwise", "experts.down_proj": "rowwise"}
    assert plan_of(rules, experts=Experts()).modules == {"experts": Style(Form.EXPERTS)}


def test_a_model_inside_another_has_names_of_the_whole() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rules = {"up": "colwise", "experts.down_proj": "rowwise"}
            self.inner = nn.ModuleDict({"model": Planned(rules, up=nn.Linear(4, 4), experts=Experts())})

        def __getattr__(self, name: str) -> Any:  # as wrappers do
            return super().__getattr__(name) if name == "inner" else getattr(self.inner["model"], name)

    plan = hugging_face.plan_of(Wrapped())
    assert plan is not None
    assert (plan.modules, plan.source) == ({"inner.model.up": COLUMN}, "Planned.tp_plan")
    assert plan.parameters == {"inner.model.experts.down_proj": ROW}


def test_a_model_without_a_plan_has_none() -> None:
    assert hugging_face.plan_of(nn.Linear(4, 4)) is None
    assert hugging_face.plan_of(Planned({}, up=nn.Linear(4, 4))) is None


#: Experts of which the parameters are cut, and the plan says nothing of the sum of what they give.
INFERRED = {"Qwen3OmniMoeTextConfig": {"layers.*.mlp.experts"}}


def test_every_family_with_a_plan_is_cut_by_it() -> None:
    """Each rule that names something in the model is in the plan, and each Linear of it has dims to be cut."""
    planned = 0
    for name in (name for name in configurations() if name not in NO_DECODER):
        model = tiny_of(name)
        found = find_plan(model, SECTION, 2)
        own = hugging_face.plan_of(model)
        if own is None:
            continue
        planned += 1
        assert own.modules.items() <= found.modules.items(), name
        assert own.parameters.items() <= found.parameters.items(), name
        generic = {".".join("*" if part.isdigit() else part for part in key.split(".")) for key in names_in(model)}
        used = {".".join("*" if part.isdigit() else part for part in key.split(".")) for key in own_names(own)}
        assert used - INFERRED.get(name, set()) == generic & set(model.tp_plan), name
        for key, style in found.modules.items():
            if style.form in (Form.COLUMN, Form.ROW):
                assert isinstance(model.get_submodule(key), nn.Linear), f"{name}: {key}"
    assert planned > 100


def names_in(model: nn.Module) -> list[str]:
    return [*(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())]


def own_names(plan: ModelPlan) -> list[str]:
    return [*plan.modules, *plan.parameters]


def test_llama_has_its_plan_and_a_whole_embedding() -> None:
    plan = find_plan(tiny_of("LlamaConfig"), SECTION, 2)
    block = {name.removeprefix("model.layers.1."): style for name, style in plan.modules.items() if ".1." in name}
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert block == {**dict.fromkeys(columns, COLUMN), "self_attn.o_proj": ROW, "mlp.down_proj": ROW}
    outside = {name: style for name, style in plan.modules.items() if ".layers." not in name}
    assert outside == {"lm_head": GATHERED_COLUMN}
    assert plan.source == "LlamaForCausalLM.tp_plan"
    assert plan.attributes == {}


def test_a_tied_head_has_its_embedding_cut_over_tokens() -> None:
    plan = find_plan(tiny_of("GemmaConfig"), SECTION, 2)
    assert plan.modules["lm_head"] == GATHERED_COLUMN
    assert plan.modules["model.embed_tokens"] == Style(Form.VOCABULARY)


def test_latent_attention_knows_its_rotated_columns() -> None:
    plan = find_plan(tiny_of("DeepseekV2Config"), SECTION, 2)
    assert plan.modules["model.layers.0.self_attn.kv_a_proj_with_mqa"] == Style(Form.SHARED_TAIL, tail=8)
