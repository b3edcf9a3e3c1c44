"""The traps that clients of DeepSpeed set, each with the test that walks into it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLIENTS, ENGINE, FACE = "clients", "runtime/engine", "shared/as_deepspeed"
#: What would go wrong: the file and test that would show it.
TRAPS = {
    "D1 an engine that is no module": (ENGINE, "test_torch_module", "test_an_engine_is_a_child_of_another_module"),
    "D2 a rate that stays at its first value": (CLIENTS, "test_hf_trainer", "test_losses_norms_rates_and_weights_are"),
    "D3 a loss that is divided twice": (CLIENTS, "test_accelerate", "test_losses_norms_rates_and_weights_are"),
    "D4 a step off the boundary": (CLIENTS, "test_accelerate", "test_stages_that_accelerate_accumulates_alike"),
    "D5 half a checkpoint": (CLIENTS, "test_hf_trainer", "test_a_kill_inside_a_save"),
    "D6 an error where no checkpoint is yet": (ENGINE, "test_program_configs", "test_a_checkpoint_that_is_not_there"),
    "D7 dicts that programs make": ("shared/config", "test_programs", "test_what_clients_hand_over"),
    "D8 a copy of the config": (ENGINE, "test_program_configs", "test_the_config_of_an_engine_is_the_very_dict"),
    "D9 slices taken for values": (CLIENTS, "test_hf_models", "test_a_slice_says_what_it_is"),
    "D10 shards that a script moves": (
        "runtime/zero",
        "test_partition_parameters",
        "test_a_piece_cannot_be_given_other",
    ),
    "D11 hooks that are taken off": (CLIENTS, "test_trl", "test_grpo_generates_unequal_lengths"),
    "D12 buffers in another dtype": (CLIENTS, "test_hf_models", "test_buffers_and_what_is_made_after"),
    "D13 an optimizer that is none of DeepSpeed's": (CLIENTS, "test_lightning", "test_the_optimizer_of_an_engine_is"),
    "D14 a norm that nobody clips": (CLIENTS, "test_accelerate", "test_losses_norms_rates_and_weights_are"),
    "D15 generation that hangs": (CLIENTS, "test_hf_models", "test_ranks_generate_answers_of_unequal_lengths"),
    "D16 several engines": (CLIENTS, "test_accelerate", "test_three_engines_of_other_stages"),
    "D17 words of the script": ("e2e", "test_as_deepspeed", "test_ranks_and_what_they_start_find_dsrun"),
    "D18 sections for trackers": ("shared/config", "test_programs", "test_sections_that_only_tell"),
    "D19 DeepSpeed's own variables": (f"{ENGINE}/compose", "test_distributed", "test_groups_wait_as_long"),
    "D20 training without DeepSpeed": (CLIENTS, "test_accelerate", "test_a_job_that_accelerate_keeps_from"),
    "D21 frozen parameters": (CLIENTS, "test_peft", "test_lora_has_the_same_losses_and_file"),
    "D22 states that a script reads": ("runtime/optim/states", "test_lookup", "test_the_state_of_a_parameter_is_not"),
    "D23 nested zero.Init": (CLIENTS, "test_hf_models", "test_buffers_and_what_is_made_after"),
    "D24 an engine beside workers": (CLIENTS, "test_hf_trainer", "test_a_classifier_trains_from_workers"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_has_its_test(trap: str) -> None:
    folder, file, beginning = TRAPS[trap]
    tree = ast.parse((ROOT / folder / f"{file}.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len([name for name in names if name.startswith(beginning)]) >= 1, beginning


def test_every_trap_is_named() -> None:
    numbers = sorted(int(trap.split()[0][1:]) for trap in TRAPS)
    assert numbers == list(range(1, 25))
