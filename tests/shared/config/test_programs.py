"""Configs that programs make are read with a note for each thing that is changed; the same in a file stays strict."""

from __future__ import annotations

import copy
import enum
import json
from pathlib import Path
from typing import Any

import pytest

from dsrun.config.findings import Finding, Severity
from dsrun.config.load import inspect, load
from dsrun.config.provenance import Kind
from dsrun.errors import ConfigError
from support import kits

FOLDER = Path(__file__).parents[2] / "fixtures" / "program_configs"
RECORDED: dict[str, dict[str, Any]] = json.loads((FOLDER / "recorded.json").read_text())["configs"]
WRITTEN: dict[str, dict[str, Any]] = json.loads((FOLDER / "written.json").read_text())
CONFIGS = {**RECORDED, **WRITTEN}

SAVES = (
    "`checkpoint.asynchronous` is not set; read as false, for a script of DeepSpeed takes a checkpoint for complete "
    "once `save_checkpoint` has returned"
)
CLIPS = "`gradient_clipping` is not set; gradients are clipped at norm 1.0, as in DeepSpeed since 0.19"
ZERO = "zero_optimization"


def idle(*keys: str) -> str:
    return f"{', '.join(f'`{key}`' for key in keys)} {'has' if len(keys) == 1 else 'have'} no effect here"


def dotted(key: str) -> str:
    return f"`{ZERO}.{key}` is written as one key, with dots; read as a key of `{ZERO}`"


BUCKETS = (f"{ZERO}.allgather_bucket_size", f"{ZERO}.reduce_bucket_size")

#: Everything that is said about each config, in order, and some of the values that it has for two ranks.
EXPECTED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "accelerate stage 2": ([SAVES], {"gradient_clipping": 1.0, "steps_per_print": None}),
    "accelerate stage 3, offloaded, bf16": (
        [SAVES],
        {"gradient_clipping": 0.5, "bf16.enabled": True, f"{ZERO}.offload_param.device": "cpu"},
    ),
    "accelerate with a file": (
        [SAVES, idle(f"{ZERO}.reduce_bucket_size")],
        {f"{ZERO}.stage3_prefetch_bucket_size": 1166, "scheduler.params.warmup_num_steps": 2},
    ),
    "transformers zero2": ([SAVES, idle(*BUCKETS)], {"bf16.enabled": True, "optimizer.params.lr": 5e-5}),
    "transformers zero3": (
        [SAVES, idle(f"{ZERO}.reduce_bucket_size")],
        {f"{ZERO}.stage3_prefetch_bucket_size": 1166, f"{ZERO}.stage3_param_persistence_threshold": 360},
    ),
    "transformers zero3_offload": (
        [SAVES, idle(f"{ZERO}.reduce_bucket_size")],
        {f"{ZERO}.offload_optimizer.device": "cpu", f"{ZERO}.offload_param.device": "cpu"},
    ),
    "transformers zero2, the script's optimizer": ([SAVES, CLIPS], {"optimizer": None, f"{ZERO}.stage": 2}),
    "trl reference, zero2": ([SAVES, idle(*BUCKETS)], {f"{ZERO}.stage": 0, "optimizer": None}),
    "trl reference, zero3_offload": (
        [
            *map(dotted, ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")),
            f"`{ZERO}.stage3_prefetch_bucket_size` is 1166.3999999999999; read as 1166, for elements are whole",
            SAVES,
            idle(f"{ZERO}.reduce_bucket_size"),
        ],
        {
            f"{ZERO}.reduce_bucket_size": 1296,
            f"{ZERO}.stage3_param_persistence_threshold": 360,
            f"{ZERO}.stage3_prefetch_bucket_size": 1166,
        },
    ),
    "trl reference, chosen sizes": (
        [
            f"`{ZERO}.reduce_bucket_size` is 1296 as one key, with dots, and 500000000.0 in `{ZERO}`; the latter "
            "counts, as in DeepSpeed, which reads no key with dots",
            dotted("stage3_param_persistence_threshold"),
            f"`{ZERO}.stage3_prefetch_bucket_size` is 1166.3999999999999 as one key, with dots, and 50000000.0 in "
            f"`{ZERO}`; the latter counts, as in DeepSpeed, which reads no key with dots",
            SAVES,
        ],
        {f"{ZERO}.reduce_bucket_size": 500_000_000, f"{ZERO}.stage3_prefetch_bucket_size": 50_000_000},
    ),
    "OpenRLHF training, stage 3": (
        [
            f'"auto" was left in 3 keys, which take the default: `{ZERO}.sub_group_size` 1000000000, '
            f"`{ZERO}.stage3_max_live_parameters` none, `{ZERO}.stage3_max_reuse_distance` 1000000000",
            SAVES,
        ],
        {f"{ZERO}.stage3_prefetch_bucket_size": "auto", f"{ZERO}.stage3_max_live_parameters": None},
    ),
    "OpenRLHF training, stage 2": (
        [
            f'"auto" was left in 3 keys, which take the default: `{ZERO}.sub_group_size` 1000000000, '
            f"`{ZERO}.stage3_max_live_parameters` none, `{ZERO}.stage3_max_reuse_distance` 1000000000",
            SAVES,
            idle(f"{ZERO}.stage3_param_persistence_threshold", f"{ZERO}.stage3_prefetch_bucket_size"),
        ],
        {"optimizer.params.betas": (0.9, 0.95)},
    ),
    "OpenRLHF evaluation, stage 3": (
        [
            f'"auto" was left in 2 keys, which take the default: `{ZERO}.stage3_max_live_parameters` none, '
            f"`{ZERO}.stage3_max_reuse_distance` 1000000000",
            SAVES,
        ],
        {"optimizer": None, f"{ZERO}.offload_param.device": "cpu"},
    ),
    "open-instruct training, stage 0": (
        [
            f'"auto" was left in 3 keys, which take the default: `{ZERO}.sub_group_size` 1000000000, '
            f"`{ZERO}.stage3_max_live_parameters` none, `{ZERO}.stage3_max_reuse_distance` 1000000000",
            SAVES,
            idle(
                f"{ZERO}.stage3_param_persistence_threshold",
                f"{ZERO}.stage3_prefetch_bucket_size",
                f"{ZERO}.zero_hpz_partition_size",
            ),
        ],
        {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"},
    ),
    "Lightning, stage 3 with offload": (
        [
            "`aio.thread_count` is another name of `aio.intra_op_parallelism`, and read as that",
            SAVES,
            idle(
                *BUCKETS,
                f"{ZERO}.sub_group_size",
                f"{ZERO}.offload_optimizer.nvme_path",
                f"{ZERO}.offload_optimizer.buffer_count",
                f"{ZERO}.offload_param.nvme_path",
                "aio",
            ),
        ],
        {"aio.intra_op_parallelism": 1, "gradient_clipping": 0.0},
    ),
    "LLaMA-Factory, stage 2 before the trainer fills it in": (
        [
            '"auto" was left in 3 keys, which take the default: `gradient_clipping` 1.0, `fp16.enabled` false, '
            "`bf16.enabled` false",
            SAVES,
            idle(f"{ZERO}.overlap_comm", f"{ZERO}.round_robin_gradients"),
        ],
        {"fp16.enabled": False, "bf16.enabled": False},
    ),
    "axolotl, stage 1 with compilation": (
        [
            '"auto" was left in a key, which takes the default: `fp16.enabled` false',
            "`compile.disable` does nothing: leave the section out",
            "`compile.backend` does nothing: hand the backend to `engine.compile`",
            SAVES,
        ],
        {"bf16.enabled": True, "fp16.enabled": False},
    ),
    "ms-swift, stage 3": ([SAVES, idle(f"{ZERO}.overlap_comm")], {f"{ZERO}.stage3_prefetch_bucket_size": 0}),
    "a chat example with monitors": (
        [
            SAVES,
            idle(
                f"{ZERO}.stage3_param_persistence_threshold",
                f"{ZERO}.stage3_max_live_parameters",
                f"{ZERO}.stage3_prefetch_bucket_size",
                f"{ZERO}.memory_efficient_linear",
            ),
        ],
        {"steps_per_print": 10},
    ),
}

DOTTED = [
    f"{ZERO}.{name}"
    for name in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
]
#: Keys for which the same config is refused where it is a file that somebody wrote.
REFUSED_IN_A_FILE = {
    "open-instruct training, stage 0": [f"{ZERO}.zero_hpz_partition_size"],
    "trl reference, zero3_offload": DOTTED,
    "trl reference, chosen sizes": DOTTED,
    "LLaMA-Factory, stage 2 before the trainer fills it in": ["fp16.enabled", "bf16.enabled"],
}

SMALL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "checkpoint": {"asynchronous": True},
}


def value_at(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def notes(more: dict[str, Any]) -> list[str]:
    """What is said of a small config that a program made, which is else silent."""
    findings = load({**SMALL, **more}, world_size=2, as_deepspeed=True).findings
    assert {finding.severity for finding in findings} <= {Severity.NOTE}
    return [finding.message for finding in findings]


def errors(more: dict[str, Any], *, as_deepspeed: bool = True) -> list[Finding]:
    findings = inspect({**SMALL, **more}, world_size=2, as_deepspeed=as_deepspeed).findings
    return [finding for finding in findings if finding.severity is Severity.ERROR]


# Dicts of clients -----------------------------------------------------------------------------------------------------


def test_every_recorded_config_has_its_expectation() -> None:
    assert EXPECTED.keys() == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_clients_hand_over_is_read_and_nothing_is_changed_in_silence(name: str) -> None:
    given = copy.deepcopy(CONFIGS[name])
    config = load(given, world_size=2, as_deepspeed=True)
    said, values = EXPECTED[name]
    assert [finding.message for finding in config.findings] == said
    assert {path: value_at(config, path) for path in values} == values
    assert config.batch is not None
    assert not config.checkpoint.asynchronous
    assert given == CONFIGS[name]
    assert config.given is given
    assert config.raw == given
    assert config.raw is not given


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_in_a_file_stays_strict(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIGS[name]))
    findings = inspect(path, world_size=2, as_deepspeed=True).findings
    refused = [finding.key for finding in findings if finding.severity is Severity.ERROR]
    assert refused == REFUSED_IN_A_FILE.get(name, [])


def test_the_same_in_a_dict_of_a_script_of_dsrun_stays_strict() -> None:
    more = {"zero_optimization.stage": 3, "fp16": {"enabled": "auto"}}
    assert notes(more)
    refused = [finding.key for finding in errors(more, as_deepspeed=False)]
    assert refused == ["zero_optimization.stage", "fp16.enabled"]


# Files of fine-tuning kits -------------------------------------------------------------------------------------------

KITS = kits.configs()
#: Keys for which a kit's config is refused, whoever reads it.
REFUSED_OF_KITS = {
    # Words that DeepSpeed reads nowhere.
    "LLaMA-Factory z3_fp8": ["comms_config", "monitor_config"],
}


@pytest.mark.parametrize("name", KITS)
def test_what_a_kit_comes_with_is_read_or_refused_by_the_name_of_a_key(name: str) -> None:
    given = {**KITS[name], "train_micro_batch_size_per_gpu": 1}
    found = inspect(copy.deepcopy(given), world_size=2, as_deepspeed=True)
    refused = [finding.key for finding in found.findings if finding.severity is Severity.ERROR]
    assert refused == REFUSED_OF_KITS.get(name, [])
    assert (found.config is None) == bool(refused)
    if found.config is not None:
        section = given["zero_optimization"]
        assert found.config.zero_optimization.stage == section["stage"]
        offload = section.get("offload_optimizer", {}).get("device", "none")
        assert found.config.zero_optimization.offload_optimizer.device == offload


# Keys with dots -------------------------------------------------------------------------------------------------------


def test_keys_with_dots_are_expanded_at_every_level() -> None:
    config = load(
        {
            **SMALL,
            "zero_optimization.stage": 3,
            "zero_optimization": {"offload_optimizer.device": "cpu"},
            "zero_optimization.offload_param.device": "cpu",
            "optimizer.type": "Adam",
            "optimizer.params.lr": 0.5,
            "bfloat16.enabled": True,
            "bf16": {"check_grad_overflow": False},
        },
        world_size=2,
        as_deepspeed=True,
    )
    zero = config.zero_optimization
    assert (zero.stage, zero.offload_optimizer.device, zero.offload_param.device) == (3, "cpu", "cpu")
    assert config.optimizer is not None
    assert (config.optimizer.type, config.optimizer.params.lr) == ("Adam", 0.5)
    assert (config.bf16.enabled, config.bf16.check_grad_overflow) == (True, False)
    assert sum("with dots" in finding.message for finding in config.findings) == 6


def test_both_forms_are_refused_unless_they_are_equal_or_leave_only_sizes_open() -> None:
    both = {"zero_optimization.stage": 3, "zero_optimization": {"stage": 2}}
    (error,) = errors(both)
    said = "`zero_optimization.stage` is 3 as one key, with dots, and 2 in `zero_optimization`; expected one value"
    assert (error.message, error.hint) == (said, "leave out one of them")
    both["zero_optimization"] = {"stage": 3}
    said = (
        "`zero_optimization.stage` is written as one key, with dots, and in `zero_optimization` too; both say the same"
    )
    assert notes(both) == [said]
    size = "stage3_prefetch_bucket_size"
    assert notes({f"zero_optimization.{size}": 0.9 * 36 * 36, "zero_optimization": {"stage": 3, size: 1166}}) == [
        said.replace("stage`", f"{size}`")
    ]
    (error,) = errors({"zero_optimization.stage": 3, "zero_optimization": True})
    assert error.message.endswith("is a key of `zero_optimization`, which is true beside it; expected one")


def test_a_key_with_dots_that_names_nothing_is_refused_with_what_was_meant() -> None:
    found = errors({"zero_optimisation.stage": 1, "zero_optimization.reduce_buket_size": 1, "a.b": 1})
    assert [(error.key, error.hint) for error in found] == [
        ("zero_optimisation.stage", "did you mean `zero_optimization`?"),
        ("a.b", None),
        ("zero_optimization.reduce_buket_size", "did you mean `zero_optimization.reduce_bucket_size`?"),
    ]


# "auto", infinity, fractions and nothing ------------------------------------------------------------------------------


def test_auto_that_is_left_over_is_the_default_with_one_note_for_all() -> None:
    more = {
        "zero_optimization": {"stage": 3, "sub_group_size": "auto", "offload_optimizer": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        "communication_data_type": "auto",
    }
    assert notes(more) == [
        '"auto" was left in 6 keys, which take the default: `zero_optimization.sub_group_size` 1000000000, '
        "`zero_optimization.offload_optimizer` left out, `optimizer.params.lr` 0.001, `optimizer.params.betas` "
        "[0.9, 0.999], `scheduler.params.warmup_max_lr` the optimizer's learning rate, `communication_data_type` none"
    ]


def test_auto_of_a_section_that_is_gone_is_off() -> None:
    more = {"amp": {"enabled": "auto", "opt_level": "auto"}, "quantize_training": "auto"}
    findings = load({**SMALL, **more}, world_size=2, as_deepspeed=True).findings
    said = [f"`{key}` does nothing: it is gone, and off here" for key in more]
    assert [(finding.severity, finding.message) for finding in findings] == [(Severity.WARNING, one) for one in said]


def test_batch_sizes_that_follow_from_nothing_are_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match="does not say how large a batch is") as caught:
        load({"train_batch_size": "auto", "zero_optimization": {"stage": 2}}, world_size=2, as_deepspeed=True)
    assert caught.value.hint is not None
    assert "train_micro_batch_size_per_gpu" in caught.value.hint


def test_auto_of_a_key_without_default_is_refused() -> None:
    params = {"total_num_steps": "auto", "warmup_max_lr": 1e-3}
    (error,) = errors({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    assert error.key == "scheduler.params.total_num_steps"


def test_infinite_steps_are_never_and_parts_of_elements_are_rounded_down() -> None:
    given = {**SMALL, "steps_per_print": float("inf"), "zero_optimization": {"stage": 3, "max_live_parameters": 2.9}}
    config = load(given, world_size=2, as_deepspeed=True)
    assert config.steps_per_print is None
    assert config.zero_optimization.stage3_max_live_parameters == 2
    assert any("is 2.9; read as 2" in finding.message for finding in config.findings)
    zero = {"stage": 3, "stage3_max_live_parameters": 2.9}
    assert [error.key for error in errors({"zero_optimization": zero}, as_deepspeed=False)]
    assert [error.key for error in errors({"zero_optimization": {"stage": 2.5}})] == ["zero_optimization.stage"]


def test_what_is_none_is_as_if_left_out() -> None:
    more = dict.fromkeys(("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "wandb", "steps_per_print"))
    assert notes({**more, "aio": {"block_size": None}, "data_types": {"grad_accum_dtype": None}}) == []


def test_enumerations_and_paths_are_their_values(tmp_path: Path) -> None:
    device = enum.Enum("device", {"nvme": "nvme"}).nvme
    named = {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": tmp_path}}
    found = load({**SMALL, "zero_optimization": named}).zero_optimization.offload_optimizer
    assert (found.device, found.nvme_path) == ("nvme", (str(tmp_path),))


# What this version does not do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"tensor_parallel": {"autotp_size": 1}},
        {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}},
        {"sequence_parallel_size": 1},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_weights": False}},
        {"hybrid_engine": {"enabled": False, "max_out_tokens": 512}},
        {"autotuning": {"enabled": False}, "data_efficiency": {"enabled": False}, "wandb": {"enabled": False}},
    ],
)
def test_keys_that_ask_for_nothing_are_taken_in_silence(more: dict[str, Any]) -> None:
    assert notes(more) == []


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"])
def test_what_a_program_asks_of_another_stage_is_noted(stage: int, key: str) -> None:
    given = {"zero_optimization": {"stage": stage, key: 8 if key == "zero_hpz_partition_size" else True}}
    assert notes(given) == [idle(f"{ZERO}.{key}")]
    assert [error.key for error in errors(given, as_deepspeed=False)] == [f"{ZERO}.{key}"]


@pytest.mark.parametrize(
    "section",
    ["tensorboard", "csv_monitor", "wandb", "comet", "mlflow", "trackio", "aim", "comms_logger", "flops_profiler"],
)
def test_sections_that_only_tell_are_read_for_a_program_as_for_a_file(section: str) -> None:
    assert notes({section: {"enabled": True}}) == []
    assert not [
        finding
        for finding in inspect({**SMALL, section: {"enabled": True}}).findings
        if finding.severity is Severity.ERROR
    ]


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("sequence_parallel_size", {"sequence_parallel_size": 2}),
        (
            "zero_optimization.zero_hpz_partition_size",
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        ),
        ("hybrid_engine.enabled", {"hybrid_engine": {"enabled": True}}),
        ("data_efficiency.enabled", {"data_efficiency": {"enabled": True}}),
        ("elasticity", {"elasticity": {"enabled": True}}),
        ("zero_optimization.stagee", {"zero_optimization": {"stagee": 3}}),
    ],
)
def test_typos_and_what_cannot_be_done_stay_refused_by_name(key: str, more: dict[str, Any]) -> None:
    assert key in [error.key for error in errors(more)]


# Batches --------------------------------------------------------------------------------------------------------------


def tensor_parallel(train: int, **more: Any) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    return {"train_batch_size": train, **sizes, "tensor_parallel": {"autotp_size": 2}, **more}


def test_samples_that_a_trainer_counts_on_every_rank_of_a_layer_count_once(tmp_path: Path) -> None:
    """As transformers' does: 4 ranks, of which 2 have samples of their own."""
    config = load(tensor_parallel(24), world_size=4, as_deepspeed=True)
    assert config.batch is not None
    assert (config.batch.train_batch_size, config.train_batch_size) == (12, 12)
    said = [finding.message for finding in config.findings if finding.key == "train_batch_size"]
    assert said == [
        "`train_batch_size` is 24, which counts the samples of all 4 ranks; read as 12, for 2 ranks that share each "
        "layer have the same samples"
    ]
    right = load(tensor_parallel(12), world_size=4, as_deepspeed=True)
    assert right.batch == config.batch
    assert "train_batch_size" not in [finding.key for finding in right.findings]
    # Whoever has written it himself is told, and so is a program that has miscounted.
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(tensor_parallel(24)))
    for source, is_deepspeed in ((path, True), (tensor_parallel(24), False), (tensor_parallel(48), True)):
        with pytest.raises(ConfigError, match="!= micro batch 2 x accumulation 3 x data-parallel size 2"):
            load(source, world_size=4, as_deepspeed=is_deepspeed)


# Saving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize(
    ("section", "expected"), [({}, False), ({"asynchronous": True}, True), ({"asynchronous": None}, False)]
)
def test_a_save_is_complete_when_it_returns_unless_the_config_says_otherwise(
    section: dict[str, Any], expected: bool, is_file: bool, tmp_path: Path
) -> None:
    given = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {**section, "keep_last": 2}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    source = path if is_file else given
    config = load(source, as_deepspeed=True)
    assert config.checkpoint.asynchronous is expected
    assert config.checkpoint.keep_last == 2
    origin = config.provenance["checkpoint.asynchronous"]
    assert origin.kind is (Kind.FILE if expected else Kind.DERIVED)
    assert ("a script of DeepSpeed" in str(origin)) is not expected
    assert load(source).checkpoint.asynchronous  # of a script of dsrun
