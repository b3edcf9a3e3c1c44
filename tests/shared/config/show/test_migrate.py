"""Rewriting old configs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsrun.config.findings import Severity
from dsrun.config.load import inspect
from dsrun.config.show.migrate import dump, migrate

OLD = {
    "_comment": "kept",
    "train_batch_size": 8,
    "bfloat16": {"enabled": True, "loss_scale": 0},
    "amp": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": "3", "cpu_offload": False, "max_live_parameters": 1e9, "elastic_checkpoint": True},
    "aio": {"thread_count": 4},
}


def test_a_config_is_migrated_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"train_batch_size": "8", "colour": 1}')
    os.close(writing)
    try:
        result = migrate(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert json.loads(result.text)["train_batch_size"] == 8
    assert [finding.key for finding in result.left] == ["colour"]


def test_flags_in_quotes_become_flags_and_sections_that_are_left_empty_go() -> None:
    result = migrate({"train_batch_size": 8, "bf16": {"enabled": "True"}, "fp16": {"fp16": False}, "wandb": {}})
    document = json.loads(result.text)
    assert document["bf16"] == {"enabled": True}
    assert "fp16" not in document
    assert document["wandb"] == {}
    assert '`bf16.enabled` "True" is written as true' in result.changes


def test_an_old_config_becomes_a_modern_one_with_its_changes() -> None:
    result = migrate(OLD)
    assert json.loads(result.text) == {
        "_migrated": [
            '`zero_optimization.cpu_offload` is an old form; read as `offload_optimizer.device` "none"',
            "`bfloat16` is written as `bf16`",
            "`bf16.loss_scale` is left out: bf16 has the range of fp32 and needs no loss scale",
            "`amp` is left out: write `bf16` or `fp16`; Apex is gone",
            '`optimizer.params.lr` "1e-4" is written as the number 0.0001',
            '`zero_optimization.stage` "3" is written as the number 3',
            "`zero_optimization.max_live_parameters` is written as `zero_optimization.stage3_max_live_parameters`",
            "`zero_optimization.stage3_max_live_parameters` 1000000000.0 is written as the number 1000000000",
            "`zero_optimization.elastic_checkpoint` is left out: every checkpoint loads on any number of ranks",
            "`aio.thread_count` is written as `aio.intra_op_parallelism`",
        ],
        "_comment": "kept",
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "zero_optimization": {
            "stage": 3,
            "stage3_max_live_parameters": 1_000_000_000,
            "offload_optimizer": {"device": "none"},
        },
        "aio": {"intra_op_parallelism": 4},
    }
    assert result.left == ()


def test_the_new_config_means_the_same_and_no_spelling_is_warned_of() -> None:
    old, new = inspect(OLD), inspect(json.loads(migrate(OLD).text))
    assert old.config is not None
    assert new.config is not None
    assert new.config.model_dump() == old.config.model_dump()
    warned = [finding.key for finding in new.findings if finding.severity is Severity.WARNING]
    assert warned == ["aio"], "nothing goes to a drive in it, old or new; and no spelling is left to warn of"


def test_what_only_the_writer_can_mend_is_left_and_said() -> None:
    result = migrate({"gradient_acumulation_steps": 2, "zero_optimization": {"stage": 9}})
    assert json.loads(result.text)["gradient_acumulation_steps"] == 2
    assert [finding.message for finding in result.left] == [
        "`gradient_acumulation_steps` is not a key of the config",
        "`zero_optimization.stage` is 9; expected 0, 1, 2 or 3",
    ]


def test_a_number_beyond_every_whole_one_is_left_as_it_is_written() -> None:
    assert '"train_batch_size": 9.223372036854776e+18' in migrate({"train_batch_size": float(2**63)}).text


def test_a_modern_config_stays_as_it_is() -> None:
    assert migrate({"bf16": {"enabled": True}}).text == '{\n  "bf16": {\n    "enabled": true\n  }\n}\n'


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[4] / "configs").glob("*.json")), ids=lambda p: p.name)
def test_recipes_are_modern(path: Path) -> None:
    assert [change for change in migrate(path).changes if '"auto"' not in change] == []


def test_short_lists_of_numbers_stay_on_one_line() -> None:
    assert dump({"betas": [0.9, 0.95], "names": ["a", "b"]}) == (
        '{\n  "betas": [0.9, 0.95],\n  "names": [\n    "a",\n    "b"\n  ]\n}\n'
    )
