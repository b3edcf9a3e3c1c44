"""Keys of tensor parallelism: DeepSpeed's spellings load, and what cannot be or does nothing is said by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsrun.config.findings import Code, Severity
from dsrun.config.load import Inspection, ScriptTensorParallel, inspect, load
from dsrun.config.provenance import Kind
from dsrun.config.sections.parallel import PartitionConfig, TensorParallel
from dsrun.config.show.resolved import document
from dsrun.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
RULES = "tensor_parallel.partition_config"


def inspect_section(keys: dict[str, Any], **others: Any) -> Inspection:
    return inspect({**BATCH, "tensor_parallel": keys, **others})


def section_of(keys: dict[str, Any], **others: Any) -> TensorParallel:
    found = inspect_section(keys, **others)
    assert found.config is not None
    assert found.findings == ()
    return found.config.tensor_parallel


def said(keys: dict[str, Any], severity: Severity, **others: Any) -> list[str]:
    return [one.message for one in inspect_section(keys, **others).findings if one.severity is severity]


def rule(**keys: Any) -> dict[str, Any]:
    return {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": [".*up$"]}, keys]}}


def test_a_section_of_deepspeed_loads_as_it_stands() -> None:
    section = section_of(
        {
            "autotp_size": 4,
            "preset_model": "LLaMA",
            "tp_overlap_comm": True,
            "vocab_parallel_lm_head": None,
            "tp": {"tp_size": 4, "tp_grain_size": 1},
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [
                    {"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "ROW"},
                    {"patterns": ".*\\.qkv\\.weight$", "shape": [[8, 4, 4], -1], "partition_dim": 0},
                    {"patterns": [".*_norm\\.weight$"], "partition_type": "skip", "grad_allreduce": True},
                    {"patterns": [".*lm_head.*"], "gather_output": True, "model_types": ["llama", "qwen2"]},
                ],
            },
        }
    )
    assert (section.size, section.preset_model, section.vocab_parallel_lm_head) == (4, "llama", None)
    assert section.partition_config is not None
    row, packed, norm, head = section.partition_config.layer_specs
    assert (row.patterns, row.partition_type) == ((".*\\.o_proj\\.weight$",), "row")
    assert (packed.patterns, packed.partition_type, packed.shape) == (
        (".*\\.qkv\\.weight$",),
        "column",
        ((8, 4, 4), -1),
    )
    assert norm.grad_allreduce
    assert head.gather_output
    assert head.model_types == ("llama", "qwen2")


def test_defaults_are_those_of_deepspeed() -> None:
    section = section_of({})
    assert (section.autotp_size, section.tp.tp_size, section.tp.tp_grain_size, section.size) == (0, 1, 1, 1)
    assert (section.tp_overlap_comm, section.vocab_parallel_lm_head) == (False, None)
    assert section.vocab_parallel_ce_backend == "torch"
    assert (section.preset_model, section.partition_config, section.injection_policy_tuple) == (None, None, None)
    rules = PartitionConfig()
    assert (rules.use_default_specs, rules.strict_mode, rules.layer_specs) == (True, False, ())
    assert rules.lm_head_patterns == ("lm_head", "embed_out")


@pytest.mark.parametrize("tied", [True, False, None])
def test_the_output_layer_has_three_values(tied: bool | None) -> None:
    assert section_of({"autotp_size": 2, "vocab_parallel_lm_head": tied}).vocab_parallel_lm_head is tied


@pytest.mark.parametrize(
    ("keys", "size"), [({"autotp_size": 2}, 2), ({"tp": {"tp_size": 2}}, 2), ({"autotp_size": 2, "tp": {}}, 2), ({}, 1)]
)
def test_either_key_says_the_size(keys: dict[str, Any], size: int) -> None:
    assert section_of(keys).size == size


@pytest.mark.parametrize("inner", [2, 8])
def test_two_sizes_are_refused(inner: int) -> None:
    assert said({"autotp_size": 4, "tp": {"tp_size": inner}}, Severity.ERROR) == [
        f"`tensor_parallel.tp.tp_size` is {inner}, and `tensor_parallel.autotp_size` is 4; expected one size"
    ]


def test_a_format_is_refused_where_it_is_not_the_models() -> None:
    import torch

    half = {"bf16": {"enabled": True}}
    assert section_of({"autotp_size": 2, "dtype": torch.bfloat16}, **half).dtype == "bf16"
    assert section_of({"autotp_size": 2, "dtype": "torch.float32"}).dtype == "fp32"
    assert said({"autotp_size": 2, "dtype": "float16"}, Severity.ERROR, **half) == [
        '`tensor_parallel.dtype` is "fp16", and `bf16.enabled` is true: the model is in bf16'
    ]
    assert said({"autotp_size": 2, "dtype": "bf16"}, Severity.ERROR) == [
        '`tensor_parallel.dtype` is "bf16", and neither `bf16` nor `fp16` is enabled: the model is in fp32'
    ]


@pytest.mark.parametrize(
    "keys",
    [
        {"tp": {"tp_grain_size": 64}},
        {"injection_policy_tuple": ["attention.out"]},
        {"keep_module_on_host": True},
        {"kernel_inject": True},
        {"vocab_parallel_ce_backend": "liger"},
    ],
)
def test_keys_of_inference_are_read_and_said_to_have_no_meaning(keys: dict[str, Any]) -> None:
    found = inspect_section({"autotp_size": 2, **keys})
    assert found.config is not None
    (finding,) = found.findings
    assert (finding.severity, finding.code) == (Severity.WARNING, Code.NO_EFFECT)
    assert "has no meaning here" in finding.message


@pytest.mark.parametrize(
    ("key", "value"),
    [("preset_model", "llama"), ("tp_overlap_comm", True), ("exact", True), ("check", False), ("dtype", "fp32")],
)
def test_without_a_size_a_key_does_nothing_and_says_so(key: str, value: Any) -> None:
    assert said({key: value}, Severity.WARNING) == [
        f"`tensor_parallel.{key}` has no effect: `tensor_parallel.autotp_size` is 0, and no layer is cut"
    ]
    assert said({"autotp_size": 2, key: value}, Severity.WARNING) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"patterns": ["*.up"]},
            '.patterns` has "*.up", which is no regular expression: nothing to repeat at position 0',
        ),
        ({"patterns": []}, ".patterns` is empty; expected a regular expression over names of parameters"),
        (
            {"patterns": ["a"], "partition_type": "both"},
            '.partition_type` is "both"; expected "column", "row" or "skip"',
        ),
        ({"patterns": ["a"], "shape": [2, 0]}, ".shape` is [2, 0]; expected a list of whole numbers or -1, "),
        ({"patterns": ["a"], "shape": [2, [-1]]}, ".shape` is a list; expected a list of whole numbers or -1, "),
        ({"patterns": ["a"], "shape": [[1, 1], [2]]}, ".shape` is a list; expected a list of whole numbers or -1, "),
        ({"patterns": ["a"], "shape": [2, [[1]]]}, ".shape` is a list; expected a list of whole numbers or -1, "),
        (
            {"patterns": ["a"], "shape": [-1, [2, 3]]},
            ".shape` has a list of lengths in a dim other than 0, which is cut",
        ),
        ({"patterns": ["a"], "shape": [2], "partition_type": "row"}, ".shape` has 1 dims, and dim 1 is cut"),
        ({"patterns": ["a"], "shape": [2], "partition_type": "skip"}, '.shape` is set, and `partition_type` is "skip"'),
        ({"patterns": ["a"], "partition_dim": 2}, ".partition_dim` is 2 without `shape`; a weight has dims 0 and 1"),
        ({"patterns": ["a"], "gather_output": True, "partition_type": "row"}, ".gather_output` is true, and "),
        ({"patterns": ["a"], "grad_allreduce": True}, '.grad_allreduce` is true, and `partition_type` is "column"'),
    ],
)
def test_a_wrong_rule_is_refused_at_its_place_in_the_list(keys: dict[str, Any], message: str) -> None:
    (error,) = said(rule(**keys), Severity.ERROR)
    assert error.startswith(f"`{RULES}.layer_specs[1]{message}")


def test_a_wrong_rule_stands_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**BATCH, "tensor_parallel": rule(patterns=["("], bogus=1)}, indent=1))
    with pytest.raises(ConfigError) as raised:
        load(path)
    lines = path.read_text().splitlines()
    places = {problem.message.split(" ")[0].split(":")[-3]: problem.message for problem in raised.value.problems}
    for line, message in places.items():
        word = "bogus" if "bogus" in message else "patterns"
        assert f'"{word}"' in lines[int(line) - 1]
    assert len(places) == 2
    assert any(
        f"`{RULES}.layer_specs[1].bogus` is not a key of `{RULES}.layer_specs[1]`" in one for one in places.values()
    )


def test_what_is_no_list_or_no_object_is_named() -> None:
    assert said({"autotp_size": 2, "partition_config": {"layer_specs": {}}}, Severity.ERROR) == [
        f"`{RULES}.layer_specs` is an object; expected a list of objects"
    ]
    assert said({"autotp_size": 2, "partition_config": {"layer_specs": [7]}}, Severity.ERROR) == [
        f"`{RULES}.layer_specs[0]` is 7; expected an object"
    ]


def test_rules_that_cut_nothing_are_refused() -> None:
    strict = {"autotp_size": 2, "partition_config": {"strict_mode": True}}
    assert said(strict, Severity.ERROR) == [
        f"`{RULES}.layer_specs` is empty, and `strict_mode` is true: every Linear is refused"
    ]
    assert said({"autotp_size": 2, "partition_config": {"use_default_specs": False}}, Severity.ERROR) == [
        f"`{RULES}.layer_specs` is empty: nothing is cut"
    ]
    assert said({**strict, "preset_model": "llama"}, Severity.ERROR) == []
    assert said({"autotp_size": 2, "partition_config": {}}, Severity.ERROR) == []


def test_a_shown_config_loads_as_the_same_rules() -> None:
    given = {**BATCH, "tensor_parallel": rule(patterns=["a", "b"], partition_type="row", shape=[-1, [2, 3]])}
    config = load(given)
    again = load(json.loads(json.dumps(document(config))))
    assert again.tensor_parallel == config.tensor_parallel


OPEN = {**BATCH, "tensor_parallel": {"autotp_size": "auto"}}


def test_a_size_that_is_left_to_a_plan_is_the_one_that_was_planned() -> None:
    config = load(OPEN, world_size=8, planned={"tensor": 4, "pipe": 2})
    assert (config.tensor_parallel.autotp_size, config.tensor_parallel.size, config.pipeline.count) == (4, 4, 1)
    assert config.batch is not None
    assert config.batch.train_batch_size == 2
    source = config.provenance["tensor_parallel.autotp_size"]
    assert (source.kind, source.detail) == (Kind.DERIVED, "the fastest that fits, by the plan of the launch")
    written = load({**BATCH, "tensor_parallel": {"autotp_size": 2}}, world_size=8, planned={"tensor": 4})
    assert written.tensor_parallel.size == 2
    assert load(BATCH, world_size=8, planned={"tensor": 4, "pipe": 2}).batch == load(BATCH, world_size=8).batch


def test_a_planned_size_is_checked_as_a_written_one() -> None:
    said = r"`tensor_parallel\.autotp_size` is 3 \(the fastest that fits, by the plan of the launch\); 8 ranks do not "
    with pytest.raises(ConfigError, match=said):
        load(OPEN, world_size=8, planned={"tensor": 3})


def test_what_a_script_has_said_comes_before_the_plan() -> None:
    asked = ScriptTensorParallel(2, "fp32")
    assert load(OPEN, world_size=8, tensor_parallel=asked, planned={"tensor": 4}).tensor_parallel.size == 2
    assert load(OPEN, world_size=8, tensor_parallel=asked).tensor_parallel.size == 2


def test_without_a_plan_a_run_is_refused_and_a_check_counts_one(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(OPEN, indent=1))
    with pytest.raises(ConfigError) as error:
        load(path, world_size=8)
    assert error.value.render() == (
        f'error: {path}:5:3: `tensor_parallel.autotp_size` is "auto", and no plan has been made for this job\n'
        "hint: `dsrun --model MODEL --config FILE SCRIPT` makes one for the config that it is given; or write the "
        "number that `dsrun plan MODEL --fit` prints; 1 cuts no layer"
    )
    (note,) = inspect(path, world_size=8).findings
    assert (note.severity, note.key) == (Severity.NOTE, "tensor_parallel.autotp_size")
    assert note.message == "`tensor_parallel.autotp_size` is left to the plan of a launch: counted as 1"
    assert inspect(path).findings == ()


def test_a_batch_that_needs_shared_layers_waits_for_the_plan() -> None:
    settings = {**OPEN, "train_batch_size": 2, "gradient_accumulation_steps": 1}
    (warning,) = inspect(settings, world_size=8).findings
    assert warning.severity is Severity.WARNING
    assert 'all 8 ranks, `tensor_parallel.autotp_size` "auto" counted as 1; ' in warning.message
    assert warning.message.endswith('a value is "auto", left to the plan')
    assert load(settings, world_size=8, planned={"tensor": 4}).batch is not None


def test_a_size_left_open_has_keys_with_effect_and_one_place() -> None:
    keys = {"autotp_size": "auto", "sequence_parallel": True}
    assert inspect_section(keys).findings == ()
    assert said({**keys, "tp": {"tp_size": 2}}, Severity.ERROR) == [
        '`tensor_parallel.tp.tp_size` is 2, and `tensor_parallel.autotp_size` is "auto"; expected one size'
    ]
    assert said({**keys, "dtype": "bf16"}, Severity.ERROR)
