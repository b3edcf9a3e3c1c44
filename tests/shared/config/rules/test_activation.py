"""Keys of `activation_checkpointing` that do not go together are refused with key, value and way out."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.load import load
from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1}


def load_section(**keys: Any) -> ActivationCheckpointing:
    return load({**BATCH, "activation_checkpointing": keys}, world_size=1).activation_checkpointing


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"policy": "evry_block"},
            '`activation_checkpointing.policy` is "evry_block"; expected "none", "every_block", "interval", "ratio", '
            '"sqrt", "hierarchical", "selective", "memory_budget" or "compiler"',
        ),
        ({"policy": "interval"}, '`activation_checkpointing.policy` is "interval" and `interval` is not set'),
        ({"policy": "ratio"}, '`activation_checkpointing.policy` is "ratio" and `ratio` is not set'),
        ({"policy": "memory_budget"}, '`activation_checkpointing.policy` is "memory_budget" and'),
        (
            {"policy": "sqrt", "interval": 3},
            '`activation_checkpointing.interval` is 3, which only policy "interval" reads; the policy is "sqrt"',
        ),
        (
            {"keep_operations": ["mm"]},
            "`activation_checkpointing.keep_operations` is ['mm'], which only policy \"selective\" reads",
        ),
        (
            {"partition_activations": True},
            "`activation_checkpointing.partition_activations` is true without tensor parallelism",
        ),
        (
            {"contiguous_memory_optimization": True},
            "`activation_checkpointing.contiguous_memory_optimization` is true and `number_checkpoints` is not set",
        ),
        (
            {"nvme_path": "/fast"},
            "`activation_checkpointing.nvme_path` is ['/fast'] and `cpu_checkpointing` is false",
        ),
        (
            {"nvme_path": "/fast", "cpu_checkpointing": True, "nvme_buffer_count": 2},
            "`activation_checkpointing.nvme_buffer_count` is 2; expected 3 or more",
        ),
        (
            {"nvme_buffer_count": 8},
            "`activation_checkpointing.nvme_buffer_count` is 8 and `nvme_path` is not set",
        ),
        (
            {"policy": "every_block", "compiler_budget": 0.25},
            '`activation_checkpointing.compiler_budget` is 0.25, which only policy "compiler" reads',
        ),
        ({"blocks": ["layers.*"]}, "`activation_checkpointing.blocks` is ['layers.*'] and `policy` is not set"),
        ({"number_checkpoints": 0}, "`activation_checkpointing.number_checkpoints` is 0; expected a whole number"),
        ({"packing": "int4"}, '`activation_checkpointing.packing` is "int4"; expected "none" or "int8"'),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_section(**keys)
    assert message in str(refused.value)
    assert refused.value.hint


def test_all_clashes_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_section(policy="ratio", partition_activations=True, contiguous_memory_optimization=True)
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ({}, "none"),
        ({"partition_activations": False, "cpu_checkpointing": False}, "none"),
        ({"policy": "none", "blocks": ["layers.*"]}, "none"),
        ({"compiler_budget": 0.5, "nvme_buffer_count": 4, "blocks": []}, "none"),
        ({"profile": True, "blocks": ["layers.*"]}, "every_block"),
        ({"cpu_checkpointing": True}, "every_block"),
        ({"packing": "int8"}, "every_block"),
        ({"number_checkpoints": 4}, "every_block"),
        ({"profile": True}, "every_block"),
        ({"policy": "none", "cpu_checkpointing": True}, "none"),
        ({"policy": "sqrt"}, "sqrt"),
        ({"policy": "memory_budget", "memory_budget": "8e9"}, "memory_budget"),
    ],
)
def test_one_key_is_enough_to_recompute(keys: dict[str, Any], policy: str) -> None:
    assert load_section(**keys).chosen_policy == policy
