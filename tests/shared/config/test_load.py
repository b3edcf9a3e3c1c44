"""Loading: every way in, and what a user is told."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsrun.config.batch import BatchSizes
from dsrun.config.findings import Code, Severity
from dsrun.config.load import NotAConfigError, inspect, load
from dsrun.config.provenance import Kind
from dsrun.config.sections.optimizer import AdamParams, SgdParams
from dsrun.config.sections.scheduler import WarmupDecayParams
from dsrun.errors import ConfigError

MICRO = {"train_micro_batch_size_per_gpu": 4}


def errors_of(source: Any, *, world_size: int | None = None) -> list[tuple[str, str | None]]:
    with pytest.raises(ConfigError) as caught:
        load(source, world_size=world_size)
    return [(problem.message, problem.hint) for problem in caught.value.problems]


def findings_of(source: dict[str, Any]) -> list[str]:
    return [finding.render() for finding in load(MICRO | source).findings if finding.key != "gradient_clipping"]


def test_a_config_people_have_loads_typed() -> None:
    config = load(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "steps_per_print": 100,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": "3e-4", "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 100}},
            "zero_optimization": {
                "stage": "2",
                "overlap_comm": True,
                "reduce_bucket_size": 5e8,
                "contiguous_gradients": True,
            },
        },
        world_size=4,
    )
    assert config.batch == BatchSizes(32, 4, 2)
    assert (config.gradient_clipping, config.steps_per_print, config.bf16.enabled) == (0.5, 100, True)
    assert config.zero_optimization.stage == 2
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.optimizer is not None
    assert config.optimizer.params == AdamParams(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    assert config.scheduler is not None
    assert config.scheduler.params == WarmupDecayParams(total_num_steps=1000, warmup_num_steps=100)


@pytest.mark.parametrize(
    ("given", "key", "said", "hint"),
    [
        ({"train_batch_size": "16"}, "train_batch_size", 'the text "16"; read as 16', '"train_batch_size": 16'),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage", 'the text "3"; read as 3', '"stage": 3'),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "1e9"}},
            "zero_optimization.stage3_max_live_parameters",
            'the text "1e9"; read as 1000000000',
            '"stage3_max_live_parameters": 1000000000',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}},
            "optimizer.params.lr",
            'the text "1e-4"; read as 0.0001',
            '"lr": 0.0001',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, "0.95"]}}},
            "optimizer.params.betas",
            'the text "0.95"; read as 0.95',
            "0.95",
        ),
        ({"bf16": {"enabled": "True"}}, "bf16.enabled", 'the text "True"; read as true', '"enabled": true'),
        ({"bf16": {"enabled": 1}}, "bf16.enabled", "1; read as true", '"enabled": true'),
    ],
)
def test_a_value_of_another_kind_is_a_note(given: dict[str, Any], key: str, said: str, hint: str) -> None:
    config = load({"train_micro_batch_size_per_gpu": 1} | given)
    assert [f.render() for f in config.findings if f.code is Code.OTHER_KIND] == [
        f"note: <dict>: `{key}` is {said}\nhint: write {hint}"
    ]


def test_a_note_of_another_kind_has_its_place(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": "1"}\n}\n')
    (note,) = [finding for finding in load(path).findings if finding.code is Code.OTHER_KIND]
    assert str(note.position) == f"{path}:3:34"


@pytest.mark.parametrize(
    "given",
    [
        {"train_batch_size": 16.0},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto"}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1, "betas": [0.9, 0.95]}}},
    ],
)
def test_numbers_however_written_and_auto_are_no_notes(given: dict[str, Any]) -> None:
    config = load({"train_micro_batch_size_per_gpu": 1} | given)
    assert [finding for finding in config.findings if finding.code is Code.OTHER_KIND] == []


def test_an_empty_section_has_the_defaults_of_the_reference() -> None:
    config = load({"optimizer": {"type": "sgd"}})
    assert config.zero_optimization.stage == 0
    assert config.gradient_clipping == 1.0
    assert config.scheduler is None
    assert config.optimizer is not None
    assert config.optimizer.type == "SGD"
    assert config.optimizer.params == SgdParams(lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)


def test_every_way_in_gives_the_same_config(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}'
    (tmp_path / "ds.json").write_text(text)
    (tmp_path / "ds.yaml").write_text("train_micro_batch_size_per_gpu: 4\nzero_optimization:\n  stage: 1\n")
    (tmp_path / "hjson.json").write_text(
        "\ufeff{ // comment\r\n# another\r\ntrain_micro_batch_size_per_gpu: 4, /* third */\r\n"
        "'zero_optimization': {\"stage\": 1,},\r\n}\r\n"
    )
    sources: list[Any] = [
        json.loads(text),
        text,
        base64.urlsafe_b64encode(text.encode()).decode(),
        tmp_path / "ds.json",
        str(tmp_path / "ds.yaml"),
        tmp_path / "hjson.json",
    ]
    configs = [load(source, world_size=2) for source in sources]
    assert {config.batch for config in configs} == {BatchSizes(8, 4, 1)}
    assert {config.zero_optimization.stage for config in configs} == {1}
    assert [config.source for config in configs] == [
        "<dict>",
        "<inline>",
        "<base64>",
        str(tmp_path / "ds.json"),
        str(tmp_path / "ds.yaml"),
        str(tmp_path / "hjson.json"),
    ]
    assert all(config.raw == json.loads(text) for config in configs)


def test_all_problems_are_said_each_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n  "gradient_acumulation_steps": 2,\n  "zero_optimization": {"stage": 4, "stge": 1},\n'
        '  "offload_optimizer": {"device": "cpu"}\n}\n'
    )
    assert errors_of(path) == [
        (
            f"{path}:2:3: `gradient_acumulation_steps` is not a key of the config",
            "did you mean `gradient_accumulation_steps`?",
        ),
        (
            f"{path}:3:34: `zero_optimization.stage` is 4; expected 0, 1, 2 or 3",
            "see `dsrun config explain zero_optimization.stage`",
        ),
        (
            f"{path}:3:37: `zero_optimization.stge` is not a key of `zero_optimization`",
            "did you mean `zero_optimization.stage`?",
        ),
        (
            f"{path}:4:3: `offload_optimizer` is not a key of the config",
            "`offload_optimizer` belongs in `zero_optimization`",
        ),
    ]


def test_a_missing_file_is_said_first_with_close_names(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text("{}")
    assert errors_of(tmp_path / "zero.json") == [
        (f"file not found: {tmp_path / 'zero.json'}", f"did you mean `{tmp_path / 'zero2.json'}`?")
    ]
    assert errors_of("abcd") == [("file not found: abcd", None)]


def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"hidden_size": 4096, "vocab_size": 32000, "model_type": "llama", "rope_theta": 1.0}')
    with pytest.raises(NotAConfigError) as caught:
        load(path)
    assert caught.value.render() == (
        f"error: {path}: this is no dsrun config: none of its 4 keys is known "
        "(`hidden_size`, `vocab_size`, `model_type`, ...)\n"
        "hint: if the file is for the script, put `--` before the script: `dsrun -- train.py --config FILE`"
    )


def test_a_single_strange_key_is_another_kind_of_file_and_a_misspelt_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rate: 3\n")
    with pytest.raises(NotAConfigError, match=r"this is no dsrun config: its only key is not known \(`rate`\)"):
        load(path)
    path.write_text("optimizr: 3\n")
    assert (f"{path}:1:1: `optimizr` is not a key of the config", "did you mean `optimizer`?") in errors_of(path)


def test_batch_misfit_is_found_for_the_given_world_size(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n "train_batch_size": 10,\n "train_micro_batch_size_per_gpu": 4,\n "gradient_accumulation_steps": 1\n}'
    )
    assert load(path).batch is None
    assert errors_of(path, world_size=2) == [
        (
            f"{path}:2:2: `train_batch_size` 10 != micro batch 4 x accumulation 1 x data-parallel size 2 (8); "
            "data-parallel size is all 2 ranks",
            "nearest that fits: `train_batch_size` 8 = micro batch 4 x accumulation 1 x data-parallel size 2",
        )
    ]
    with pytest.raises(ConfigError, match="10 != micro batch 4"):
        load(path).with_world_size(2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            "`zero_optimization.zenflow` is set; this version does not update gradients selectively (ZenFlow) yet",
        ),
        (
            {"sequence_parallel_size": 4},
            "`sequence_parallel_size` is 4; this version does not cut sequences over ranks yet",
        ),
        (
            {"optimizer": {"type": "MuAdam", "params": {"lr": 1}}},
            '`optimizer.type` is "MuAdam"; this version does not build that optimizer yet',
        ),
    ],
)
def test_what_is_not_built_yet_is_an_error_and_never_ignored(config: dict[str, Any], message: str) -> None:
    assert [text for text, _ in errors_of(config)] == [f"<dict>: {message}"]


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 20}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": False}}},
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}},
        {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}},
        {"wall_clock_breakdown": False, "prescale_gradients": False},
        {"tensorboard": {"enabled": False, "output_path": "x"}, "flops_profiler": {"enabled": False}},
        {"gradient_accumulation_steps": None, "train_micro_batch_size_per_gpu": 1},
        {"_comment": "x", "//": "y", "$schema": "z", "zero_optimization": {"_why": 1}},
    ],
)
def test_what_asks_for_nothing_says_nothing(config: dict[str, Any]) -> None:
    assert findings_of(config) == []


def test_tuning_without_effect_is_noted_and_never_silent() -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "compute_grad_norm": False}}
    assert findings_of(config) == [
        "warning: <dict>: `zero_optimization.reduce_bucket_size` has no meaning here: "
        "a unit's gradients are reduced in place, in the buffer that they share",
        "note: <dict>: `zero_optimization.compute_grad_norm` has no effect yet: this version does not skip the norm",
    ]


def test_keys_of_stage_3_below_it_are_a_warning() -> None:
    config = {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}
    assert findings_of(config) == [
        "warning: <dict>: `zero_optimization.stage3_max_live_parameters` has no effect at "
        "`zero_optimization.stage` 2, only at 3"
    ]


def test_clipping_that_nobody_asked_for_is_noted() -> None:
    config = load(MICRO)
    assert [finding.render() for finding in config.findings] == [
        "note: <dict>: `gradient_clipping` is not set; gradients are clipped at norm 1.0, as in DeepSpeed since 0.19\n"
        'hint: write "gradient_clipping": 0 to train without, as DeepSpeed did before'
    ]
    assert load({**MICRO, "gradient_clipping": 0}).findings == ()


def test_removed_sections_are_refused_with_the_alternative() -> None:
    assert errors_of({"elasticity": {"enabled": True}, "optimizer": {"type": "OneBitAdam"}}) == [
        (
            "<dict>: `elasticity` is gone, from DeepSpeed as from here",
            "drop it; a checkpoint loads on any number of ranks",
        ),
        (
            '<dict>: `optimizer.type` is "OneBitAdam", which is gone, from DeepSpeed as from here',
            'write "AdamW"; 1-bit optimizers are gone',
        ),
    ]
    assert [f.severity for f in load({**MICRO, "amp": {"enabled": False}, "gradient_clipping": 1}).findings] == [
        Severity.WARNING
    ]


def test_both_precisions_are_refused() -> None:
    messages = [text for text, _ in errors_of({"fp16": {"enabled": True}, "bf16": {"enabled": True}})]
    assert "<dict>: `fp16.enabled` and `bf16.enabled` are both true; expected one" in messages


def test_auto_is_resolved_where_it_can_be_known() -> None:
    config = load(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": True},
            "fp16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": "auto", "eps": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto"}},
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
        },
        world_size=2,
    )
    assert config.batch == BatchSizes(16, 8, 1)
    assert config.gradient_clipping == 1.0
    assert config.fp16.enabled is False
    assert config.zero_optimization.stage3_prefetch_bucket_size == "auto"
    assert config.provenance["gradient_clipping"].kind is Kind.AUTO
    assert config.provenance["zero_optimization.stage"].kind is Kind.FILE
    assert config.provenance["dump_state"].kind is Kind.DEFAULT


def test_batch_left_to_the_script_is_a_warning_until_the_engine_asks() -> None:
    inspection = inspect({"train_micro_batch_size_per_gpu": "auto"}, world_size=2)
    assert inspection.config is not None
    assert inspection.config.batch is None
    assert [f.message for f in inspection.findings if f.severity is Severity.WARNING] == [
        "the config does not say how large a batch is; expected `train_micro_batch_size_per_gpu` or "
        '`train_batch_size`; a value is "auto", left to the script'
    ]
    with pytest.raises(ConfigError, match="how large a batch is"):
        load({"train_micro_batch_size_per_gpu": "auto"}, world_size=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
            '`optimizer.params.lr` is "auto", which nothing here can fill in; expected a number of at least 0',
        ),
        (
            {"bf16": {"enabled": "auto"}},
            '`bf16.enabled` is "auto", which nothing here can fill in; expected true or false',
        ),
        (
            {"zero_optimization": {"stage": "auto"}},
            '`zero_optimization.stage` is "auto", which nothing here can fill in; expected 0, 1, 2 or 3',
        ),
    ],
)
def test_auto_that_nothing_can_resolve_is_an_early_error(config: dict[str, Any], message: str) -> None:
    assert [text for text, _ in errors_of(config)] == [f"<dict>: {message}"]


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": True}, "dynamic_loss_scale": {"init_scale": 2**12, "scale_window": 7, "min_scale": 2}},
        {"fp16": {"enabled": True, "dynamic_loss_scale": {"init_scale": 2**12, "scale_window": 7, "min_scale": 2}}},
    ],
)
def test_the_old_block_of_the_loss_scale_is_read_as_keys_of_fp16(config: dict[str, Any]) -> None:
    found = load({**config, **MICRO})
    assert (found.fp16.initial_scale_power, found.fp16.loss_scale_window, found.fp16.min_loss_scale) == (12, 7, 2.0)
    prefix = "fp16." if "dynamic_loss_scale" in config["fp16"] else ""
    assert [f.message for f in found.findings if f.severity is Severity.WARNING] == [
        f"`{prefix}dynamic_loss_scale.{old}` is an old form; read as `fp16.{new}`"
        for old, new in (
            ("init_scale", "initial_scale_power"),
            ("scale_window", "loss_scale_window"),
            ("min_scale", "min_loss_scale"),
        )
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"fp16": {"enabled": True, "hysteresis": 0}},
            "`fp16.hysteresis` is 0 with a dynamic loss scale; expected an integer >= 1",
        ),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 0}},
            "`fp16.min_loss_scale` is 0 with a dynamic loss scale; expected a number > 0",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 128}},
            "`fp16.initial_scale_power` is 128 with a dynamic loss scale; "
            "expected an integer from 0 to 127: the loss is multiplied in fp32",
        ),
        (
            {"fp16": {"enabled": True, "dynamic_loss_scale": {"init_scale": 1000}}},
            "`fp16.dynamic_loss_scale.init_scale` is 1000; "
            "expected a power of 2, for it becomes `fp16.initial_scale_power`",
        ),
        (
            {"fp16": {"enabled": True, "hysteresis": 2, "dynamic_loss_scale": {"delayed_shift": 2}}},
            "`fp16.dynamic_loss_scale.delayed_shift` is the old form of `fp16.hysteresis`, and both are here",
        ),
        (
            {"fp16": {"enabled": True, "dynamic_loss_scale": {"shift": 2}}},
            "`fp16.dynamic_loss_scale.shift` is no key of the old block; expected one of init_scale, scale_window, "
            "delayed_shift, consecutive_hysteresis, min_scale",
        ),
        (
            {"dynamic_loss_scale": {"init_scale": 2}, **MICRO},
            "`dynamic_loss_scale` is an old form of `fp16`; expected a block of its keys, beside a section `fp16`",
        ),
        (
            {"fp16": {"enabled": True, "dynamic_loss_scale": True}},
            "`fp16.dynamic_loss_scale` is an old form of `fp16`; expected a block of its keys, beside a section `fp16`",
        ),
    ],
)
def test_a_loss_scale_that_cannot_work_is_refused(config: dict[str, Any], message: str) -> None:
    assert [text for text, _ in errors_of(config)] == [f"<dict>: {message}"]


def test_sums_in_fp32_are_not_promised_where_gradients_are_added_up_in_bf16() -> None:
    pure = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    assert [text for text, _ in errors_of({"bf16": pure, **sums})] == [
        '<dict>: `data_types.grad_accum_dtype` is "fp32", and `bf16.bf16_master_weights_and_grads` is true, '
        "which adds gradients up in bf16"
    ]
    assert load({"bf16": {"enabled": True}, **sums, **MICRO}).data_types.grad_accum_dtype == "fp32"


@pytest.mark.parametrize(
    ("bf16", "optimizer", "message"),
    [
        (
            {"bf16_optimizer_states": True},
            "AdamW",
            "`bf16.bf16_optimizer_states` is true and `bf16.bf16_master_weights_and_grads` is not; "
            "expected both, as in DeepSpeed",
        ),
        (
            {"bf16_master_weights_and_grads": True},
            "Lamb",
            '`bf16.bf16_master_weights_and_grads` is true with optimizer type "Lamb", '
            "which updates all tensors at once in fp32",
        ),
        (
            {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "Muon",
            '`bf16.bf16_master_weights_and_grads` is true with optimizer type "Muon", which keeps fp32; '
            "expected Adam, AdamW or SGD",
        ),
    ],
)
def test_states_in_bf16_need_masters_in_bf16_and_an_optimizer_that_works_in_it(
    bf16: dict[str, Any], optimizer: str, message: str
) -> None:
    config = {"bf16": {"enabled": True, **bf16}, "optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    assert [text for text, _ in errors_of(config)] == [f"<dict>: {message}"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"data_types": {"grad_accum_dtype": "bf16"}, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
            '`data_types.grad_accum_dtype` is "bf16" with optimizer type "Muon", '
            "which updates all tensors at once in fp32",
        ),
        (
            {
                "data_types": {"grad_accum_dtype": "bf16"},
                "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
            },
            '`data_types.grad_accum_dtype` is "bf16", and `fp16.fp16_master_weights_and_grads` is true, '
            "which adds gradients up in fp16",
        ),
    ],
)
def test_sums_in_a_format_that_cannot_be_are_refused(config: dict[str, Any], message: str) -> None:
    assert [text for text, _ in errors_of(config)] == [f"<dict>: {message}"]


@pytest.mark.parametrize(
    "other", [{}, {"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}]
)
def test_fp8_wants_bf16_around_it(other: dict[str, Any]) -> None:
    assert [text for text, _ in errors_of({"fp8": {"enabled": True}, **other})] == [
        "<dict>: `fp8.enabled` is true without bf16; expected `bf16.enabled`, or `torch_autocast` with bfloat16"
    ]
    for allowed in ({"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}):
        assert load({"fp8": {"enabled": True}, **allowed, **MICRO}).fp8.recipe == "tensorwise"


KEEPS = {"keep_in_fp32_modules": ["norm"]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
            '`data_types.param_dtype` is "fp16", and parameters are bf16 here; expected the same',
        ),
        (
            {"data_types": {"param_dtype": "bf16"}},
            '`data_types.param_dtype` is "bf16", and parameters are fp32 here; expected the same',
        ),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "data_types": KEEPS},
            "`data_types.keep_in_fp32_modules` is set, and `fp16.fp16_master_weights_and_grads` is true: "
            "no master is in fp32",
        ),
    ],
)
def test_formats_of_single_tensors_that_cannot_be_are_refused(config: dict[str, Any], message: str) -> None:
    assert [text for text, _ in errors_of(config)] == [f"<dict>: {message}"]


def test_what_stays_in_fp32_cannot_be_offloaded() -> None:
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    found = [text for text, _ in errors_of({"bf16": {"enabled": True}, "data_types": KEEPS, **offload})]
    assert any(
        '`zero_optimization.offload_optimizer.device` is "cpu", which moves one format' in text for text in found
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"torch_autocast": {"enabled": True, "dtype": "torch.float16"}, "bf16": {"enabled": True}},
            '`torch_autocast.dtype` is "float16", and `bf16.enabled` is true; expected "bfloat16", one format',
        ),
        (
            {"torch_autocast": {"enabled": True}, "fp16": {"enabled": True}},
            '`torch_autocast.dtype` is "bfloat16", and `fp16.enabled` is true; expected "float16", one format',
        ),
        (
            {
                "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["Linear"]},
                "communication_data_type": "bf16",
            },
            '`torch_autocast.lower_precision_safe_modules` is set, and `communication_data_type` is "bf16", '
            "which is for all modules; expected one",
        ),
    ],
)
def test_what_autocast_cannot_do_is_refused(config: dict[str, Any], message: str) -> None:
    assert [text for text, _ in errors_of(config)] == [f"<dict>: {message}"]


def test_modules_whose_gradients_are_in_16_bits_anyway_are_said_to_make_no_difference() -> None:
    safe = {"enabled": True, "lower_precision_safe_modules": ["Linear"]}
    found = inspect({"torch_autocast": safe, "bf16": {"enabled": True}, "gradient_clipping": 1.0, **MICRO}).findings
    assert [finding.message for finding in found] == [
        "`torch_autocast.lower_precision_safe_modules` does nothing: `bf16.enabled` is true, and all gradients travel "
        "in 16 bits"
    ]


def test_what_a_fixed_loss_scale_does_not_read_is_not_judged() -> None:
    fp16 = {"enabled": True, "loss_scale": 128, "hysteresis": 0, "min_loss_scale": 0, "initial_scale_power": 500}
    assert load({"fp16": fp16, **MICRO}).fp16.loss_scale == 128


def test_old_spellings_are_read_with_a_warning() -> None:
    config = load(
        {
            "bfloat16": {"enabled": True, "loss_scale": 0},
            "zero_optimization": {"stage": 3, "max_live_parameters": 7, "cpu_offload": False},
            "gradient_clipping": 1,
            **MICRO,
        }
    )
    assert config.bf16.enabled
    assert config.zero_optimization.stage3_max_live_parameters == 7
    assert [f.message for f in config.findings if f.severity is Severity.WARNING] == [
        '`zero_optimization.cpu_offload` is an old form; read as `offload_optimizer.device` "none"',
        "`bfloat16` is another name of `bf16`, and read as that",
        "`bf16.loss_scale` does nothing: bf16 has the range of fp32 and needs no loss scale",
        "`zero_optimization.max_live_parameters` is another name of "
        "`zero_optimization.stage3_max_live_parameters`, and read as that",
    ]
    assert load({"zero_optimization": True}).zero_optimization.stage == 1


def test_loading_needs_neither_torch_nor_numpy_and_batch_not_even_pydantic() -> None:
    code = (
        "import sys, dsrun.config.batch; assert 'pydantic' not in sys.modules;"
        "import dsrun.config.load as l; l.load({}); assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_without_a_batch_size_is_a_warning_until_a_run_needs_it() -> None:
    assert [f.message for f in load({"gradient_clipping": 1}).findings] == [
        "neither `train_micro_batch_size_per_gpu` nor `train_batch_size` is set; a run needs one"
    ]


class _Upath:
    """A path of no `pathlib`, as those of fsspec's friends are."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __fspath__(self) -> Any:
        return self._path


def test_any_path_of_text_is_read_and_named_by_its_text(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(MICRO | {"gradient_clipping": -1}))
    ((message, _),) = errors_of(_Upath(str(path)))
    assert message.startswith(f"{path}:")
    path.write_text(json.dumps(MICRO))
    assert inspect(_Upath(str(path))).config is not None
    ((message, _),) = errors_of(_Upath(bytes(path)))
    assert message == "the config is of type _Upath; expected a path, JSON text or a dict"


def test_a_config_of_the_wrong_kind_is_refused_by_name() -> None:
    assert errors_of(["--config"]) == [("the config is of type list; expected a path, JSON text or a dict", None)]


@pytest.mark.parametrize("key", [["sEcReTsEcReT"], 1234567890123456])
def test_a_key_of_an_account_that_is_no_text_is_not_shown(key: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_micro_batch_size_per_gpu": 1, "comet": {"enabled": True, "api_key": key}})
    assert str(caught.value) == "<dict>: `comet.api_key` is a secret; expected text"
