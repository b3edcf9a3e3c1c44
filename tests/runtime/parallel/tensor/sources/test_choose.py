"""What a user wrote comes before what a model brings along, and that before names; no plan is an error with rules."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsrun.config.load import load
from dsrun.config.sections.parallel import TensorParallel
from dsrun.errors import ModelError
from dsrun.runtime.parallel.tensor.sources.choose import find_plan
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, Form, Style

RULES = {"layer_specs": [{"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"}]}


class Attention(nn.Module):
    """Four Linears and a number of heads."""

    def __init__(self, names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")) -> None:
        super().__init__()
        self.num_heads = 4
        for name in names:
            self.add_module(name, nn.Linear(8, 8))


class Block(nn.Module):
    """A block that attends."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.self_attn = Attention(names) if names else Attention()


class Model(nn.Module):
    """A model with a plan, if it is given rules, and a type, if it is given one."""

    def __init__(self, rules: dict[str, str] | None = None, *names: str, model_type: str = "") -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=model_type)
        self.rules = rules
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(*names) for _ in range(2))
        self.lm_head = nn.Linear(8, 16, bias=False)

    @property
    def tp_plan(self) -> dict[str, str] | None:
        return self.rules


OWN = {"layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}


def model_of(*args: Any, **kwargs: Any) -> Model:
    with torch.device("meta"):
        return Model(*args, **kwargs)


def section_of(**keys: Any) -> TensorParallel:
    given = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2, **keys}}
    return load(given).tensor_parallel


def cut_in(model: nn.Module, **keys: Any) -> tuple[str, set[str]]:
    """Returns the source of the plan and the layers that it cuts in the first block."""
    plan = find_plan(model, section_of(**keys), 2)
    prefix = "layers.0.self_attn."
    return plan.source, {name.removeprefix(prefix) for name in plan.modules if name.startswith(prefix)}


ALL = {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_rules_of_the_config_come_first() -> None:
    model = model_of(OWN, model_type="llama")
    assert cut_in(model, partition_config=RULES) == ("`tensor_parallel.partition_config`", {"o_proj"})
    assert cut_in(model, preset_model="llama") == ('`tensor_parallel.preset_model` "llama"', ALL)
    assert cut_in(model, partition_config={}) == ("Model.tp_plan", {"v_proj", "o_proj"})


def test_rules_have_those_of_a_preset_behind_them_where_they_want_them() -> None:
    both = {"preset_model": "llama", "partition_config": {**RULES, "use_default_specs": True}}
    assert cut_in(model_of(), **both) == ("`tensor_parallel.partition_config`", ALL)
    skips = {"layer_specs": [{"patterns": [".*\\.k_proj\\.weight"], "partition_type": "skip"}]}
    plan = find_plan(model_of(), section_of(preset_model="llama", partition_config=skips), 2)
    assert plan.modules["layers.0.self_attn.k_proj"].form is Form.WHOLE
    assert plan.modules["layers.0.self_attn.q_proj"] == COLUMN
    alone = {"preset_model": "llama", "partition_config": {**RULES, "use_default_specs": False}}
    assert cut_in(model_of(), **alone)[1] == {"o_proj"}


def test_then_comes_what_the_model_brings_along_then_its_type_then_names() -> None:
    assert cut_in(model_of(OWN, model_type="llama")) == ("Model.tp_plan", {"v_proj", "o_proj"})
    assert cut_in(model_of(model_type="llama")) == ('rules of model type "llama"', ALL)
    assert cut_in(model_of(model_type="bloom")) == ("the names of its layers", ALL)
    assert cut_in(model_of()) == ("the names of its layers", ALL)


def test_a_plan_of_the_output_layer_alone_is_joined_to_names() -> None:
    model = model_of({"lm_head": "colwise_gather_output"})
    plan = find_plan(model, section_of(), 2)
    assert plan.source == "the names of its layers"
    assert plan.modules["lm_head"] == GATHERED_COLUMN
    assert plan.modules["layers.1.self_attn.o_proj"] == ROW
    assert plan.attributes == dict.fromkeys(("layers.0.self_attn", "layers.1.self_attn"), ("num_heads",))


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_is_cut_where_the_config_wants_it(tied: bool) -> None:
    model = model_of(OWN)
    if tied:
        model.lm_head.weight = model.embed.weight
    assert "lm_head" not in find_plan(model, section_of(), 2).modules
    modules = find_plan(model, section_of(vocab_parallel_lm_head=True), 2).modules
    assert modules["lm_head"] == GATHERED_COLUMN
    assert modules.get("embed") == (Style(Form.VOCABULARY) if tied else None)
    with pytest.raises(ModelError, match="the model has no Linear called `lm_head` or `embed_out`"):
        find_plan(model.layers[0], section_of(vocab_parallel_lm_head=True, partition_config=RULES), 2)


def test_a_model_without_a_plan_is_refused_with_rules_that_load_and_cut_it() -> None:
    model = model_of(None, "mix", "wo", "blend_1")
    with pytest.raises(ModelError) as error:
        find_plan(model, section_of(), 2)
    assert str(error.value) == (
        "model: cannot be cut over 2 ranks: the model (Model) has no plan, and the names of its layers lead to none: "
        "`layers.*.self_attn.mix`, `layers.*.self_attn.wo`, `layers.*.self_attn.blend_1`"
    )
    hint = error.value.hint or ""
    assert "the types here are guesses from names, lengths and order, to be looked at" in hint
    written = json.loads("{" + hint[hint.index('"tensor_parallel"') :] + "}")["tensor_parallel"]
    assert written["autotp_size"] == 2
    specs = written["partition_config"]["layer_specs"]
    assert [spec["partition_type"] for spec in specs] == ["column", "row", "skip"]
    plan = find_plan(model, section_of(**written), 2)
    assert plan.modules["layers.0.self_attn.mix"] == COLUMN
    assert plan.modules["layers.1.self_attn.wo"] == ROW
    assert len(plan.modules) == 6


def test_rules_that_cut_nothing_are_refused_with_the_layers_that_there_are() -> None:
    missed = {"layer_specs": [{"patterns": [".*\\.q_proj$"]}]}
    with pytest.raises(ModelError) as error:
        find_plan(model_of(), section_of(partition_config=missed), 2)
    assert str(error.value) == (
        "model: cannot be cut over 2 ranks: `tensor_parallel.partition_config` cuts no layer of the model (Model), "
        "which has `layers.*.self_attn.q_proj`, `layers.*.self_attn.k_proj`, `layers.*.self_attn.v_proj`, "
        "`layers.*.self_attn.o_proj`"
    )
    with pytest.raises(ModelError, match=r'`tensor_parallel.preset_model` "bloom" cuts no layer of the model'):
        find_plan(model_of(), section_of(preset_model="bloom"), 2)


class Wide(nn.Module):
    """Linears whose names say nothing, with lengths."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        for place, (inputs, outputs) in enumerate(pairwise(lengths)):
            self.add_module(["alpha", "beta", "gamma"][place], nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    ("lengths", "guesses"),
    [
        ((8, 32, 8), ["column", "row"]),
        ((8, 8, 8, 8), ["column", "skip", "row"]),
        ((8, 32, 16, 8), ["skip", "skip", "skip"]),
        ((8, 8), ["skip"]),
    ],
)
def test_layers_whose_names_say_nothing_are_guessed_by_length_and_order(lengths: Any, guesses: list[str]) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Wide(*lengths) for _ in range(2))})
    with pytest.raises(ModelError) as error:
        find_plan(model, section_of(), 2)
    hint = error.value.hint or ""
    written = json.loads("{" + hint[hint.index('"tensor_parallel"') :] + "}")["tensor_parallel"]
    assert [spec["partition_type"] for spec in written["partition_config"]["layer_specs"]] == guesses


def rules_with(*more: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {"patterns": [".*\\.[qkv]_proj\\."], "partition_type": "column"},
        {"patterns": [".*\\.o_proj\\."], "partition_type": "row"},
    ]
    return {"layer_specs": [*blocks, *more]}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"partition_type": "row"}, "takes a part of its inputs on each rank, and no column gives them"),
        ({"partition_type": "column"}, "gives each rank a part of its outputs, and no row takes them"),
        ({"partition_type": "column", "gather_output": True}, None),
        ({"partition_type": "skip"}, None),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_an_output_layer_that_gives_or_takes_parts_is_refused_with_the_way_out(
    rule: dict[str, Any], said: str | None, check: bool
) -> None:
    section = section_of(partition_config=rules_with({"patterns": ["lm_head"], **rule}), check=check)
    if said is None:
        find_plan(model_of(), section, 2)
        return
    with pytest.raises(ModelError) as error:
        find_plan(model_of(), section, 2)
    assert str(error.value) == f"model: `lm_head` (Linear) {said} (plan of `tensor_parallel.partition_config`)"
    assert error.value.hint == (
        'in `tensor_parallel.partition_config`, let it be a "column" with "gather_output": true, which gives whole '
        'outputs, or "skip" it'
    )


def test_a_pair_outside_of_blocks_and_models_without_blocks_are_as_the_rules_say() -> None:
    model = model_of()
    with torch.device("meta"):
        model.add_module("before", nn.Linear(8, 8))
    pair = [
        {"patterns": ["before"], "partition_type": "column"},
        {"patterns": ["lm_head"], "partition_type": "row"},
    ]
    assert find_plan(model, section_of(partition_config=rules_with(*pair)), 2).modules["lm_head"] == ROW
    alone = nn.ModuleDict({"part": Attention()})
    assert find_plan(alone, section_of(partition_config=RULES), 2).modules == {"part.o_proj": ROW}


def test_weights_that_are_laid_out_the_other_way_are_named() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(ModelError) as error:
        find_plan(model, section_of(), 2)
    assert "`c_attn`, `c_fc`, `c_proj` are Conv1D, whose weights are [inputs, outputs]" in str(error.value)
    assert error.value.hint == 'leave out "tensor_parallel"'


def test_a_long_list_of_layers_is_cut_short() -> None:
    names = tuple(f"mix_{chr(97 + place)}" for place in range(20))
    with pytest.raises(ModelError) as error:
        find_plan(model_of(None, *names), section_of(), 2)
    assert (error.value.hint or "").endswith("; and so on for 4 more")
    assert (error.value.hint or "").count("partition_type") == 16


@pytest.mark.parametrize(
    ("kind", "attention", "columns", "row", "numbers"),
    [
        ("Bert", "encoder.layer.1.attention", ("self.query", "self.key", "self.value"), "output.dense", True),
        ("OPT", "decoder.layers.1.self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj", True),
        ("T5", "encoder.block.1.layer.0.SelfAttention", ("q", "k", "v"), "o", True),
        ("ViT", "layers.1.attention", ("q_proj", "k_proj", "v_proj"), "o_proj", True),
    ],
)
def test_families_without_a_plan_are_cut_by_names(
    kind: str, attention: str, columns: tuple[str, ...], row: str, numbers: bool
) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{kind}Model")(config(num_hidden_layers=2))
    plan = find_plan(model, section_of(), 2)
    assert plan.source == "the names of its layers"
    assert [plan.modules[f"{attention}.{name}"] for name in columns] == [COLUMN] * 3
    assert plan.modules[f"{attention}.{row}"] == ROW
    assert any(name.startswith(attention) for name in plan.attributes) is numbers
