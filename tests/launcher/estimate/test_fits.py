"""What provably cannot fit is refused, with the numbers and what would fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.estimate.model.units import from_count
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine
from dsrun.launcher.estimate.fits import refuse_misfit
from dsrun.launcher.estimate.model import LAST_RUN

GIB = 1 << 30
BILLION = 10**9


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            }
        )
    )
    return str(path)


def gpus(count: int, free: int) -> Machine:
    return Machine(label="test", ranks=count, ranks_per_host=count, gpu=find_gpu("A100-80G"), gpu_memory_bytes=free)


def test_state_beyond_free_gpu_memory_is_refused_with_the_nearest_that_fit(config: str) -> None:
    with pytest.raises(UsageError) as error:
        refuse_misfit(from_count(7 * BILLION), config, gpus(4, 60 * GIB), most_ranks=4)
    assert error.value.render() == (
        f"error: {config}: 7B cannot fit at stage 0: 130.4 GiB of model state a rank; "
        "60.0 GiB is what a rank has of GPU memory\n"
        "hint: the model state fits with `zero_optimization.stage` 1, or `zero_optimization.stage` 2, "
        "or `zero_optimization.stage` 3; "
        "`--no-plan` starts it anyway"
    )


def test_state_of_all_ranks_counts_where_they_share_the_host(config: str) -> None:
    host = Machine(label="cpu", ranks=4, ranks_per_host=4, host_memory_bytes=70 * GIB)
    refuse_misfit(from_count(BILLION // 2), config, host, most_ranks=4)
    with pytest.raises(UsageError, match=r"18\.6 GiB of model state a rank, 74\.5 GiB for 4 ranks"):
        refuse_misfit(from_count(BILLION), config, host, most_ranks=4)


def test_pipeline_stages_count_and_are_not_guessed_where_the_script_decides_them(config: str) -> None:
    """Of 130 GiB at stage 0 a rank of four stages has a quarter; with "auto", the script's model says how many."""
    written = json.loads(Path(config).read_text())
    for stages in (4, "auto"):
        Path(config).write_text(json.dumps({**written, "pipeline": {"stages": stages}}))
        refuse_misfit(from_count(7 * BILLION), config, gpus(4, 40 * GIB), most_ranks=4)
    Path(config).write_text(json.dumps({**written, "pipeline": {"stages": 4}}))
    with pytest.raises(UsageError, match=r"cannot fit at stage 0: 3[0-9.]+ GiB of model state a rank"):
        refuse_misfit(from_count(7 * BILLION), config, gpus(4, 20 * GIB), most_ranks=4)


def test_activations_are_no_reason_to_refuse(config: str) -> None:
    refuse_misfit(from_count(7 * BILLION), config, gpus(4, 131 * GIB), most_ranks=4)


def test_a_machine_of_which_nothing_is_known_refuses_nothing(config: str) -> None:
    refuse_misfit(from_count(7 * BILLION), config, Machine(label="?", ranks=1, ranks_per_host=1), most_ranks=1)


def test_the_run_a_model_is_known_from_is_named(config: str) -> None:
    model = replace(from_count(100 * BILLION), label="GPT", notes=(f"{LAST_RUN}, job 20261121-0700-aaaa",))
    with pytest.raises(
        UsageError, match="GPT \\(the model is that of the script's last run, job 20261121-0700-aaaa\\)"
    ):
        refuse_misfit(model, config, gpus(1, GIB), most_ranks=1)


def test_where_nothing_fits_that_is_said(config: str) -> None:
    with pytest.raises(UsageError) as error:
        refuse_misfit(from_count(100 * BILLION), config, gpus(1, GIB), most_ranks=1)
    assert error.value.hint == (
        "no stage, precision or micro batch of this version fits here; see `dsrun plan --what-if`; "
        "`--no-plan` starts it anyway"
    )


def _with(config: str, **sections: object) -> None:
    written = json.loads(Path(config).read_text())
    Path(config).write_text(json.dumps({**written, **sections}))


def test_state_counts_where_offloading_puts_it(config: str) -> None:
    """130 GiB in all, of which 13 are parameters that stay on the GPU, with gradients and what they pass through."""
    model, machine = from_count(7 * BILLION), gpus(1, 80 * GIB)
    _with(config, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    refuse_misfit(model, config, replace(machine, host_memory_bytes=200 * GIB), most_ranks=1)
    refuse_misfit(model, config, machine, most_ranks=1)
    with pytest.raises(UsageError) as error:
        refuse_misfit(model, config, replace(machine, host_memory_bytes=64 * GIB), most_ranks=1)
    assert re.search(
        r"7B cannot fit at stage 2: [0-9.]+ GiB of model state in host memory a rank; "
        r"64\.0 GiB is what this machine has free",
        str(error.value),
    )
    with pytest.raises(UsageError, match=r"GiB of model state a rank; 10\.0 GiB is what a rank has of GPU memory"):
        refuse_misfit(model, config, gpus(1, 10 * GIB), most_ranks=1)


def test_stages_that_the_script_may_choose_are_refused_where_none_fits(config: str) -> None:
    """By a plan, or by a PipelineModule: of four ranks each has a quarter at best."""
    _with(config, pipeline={"stages": "auto"})
    refuse_misfit(from_count(7 * BILLION), config, gpus(4, 40 * GIB), most_ranks=4, planned={"pipe": 1})
    with pytest.raises(UsageError, match=r"cannot fit at stage 0 with any number of pipeline stages: 3[0-9.]+ GiB"):
        refuse_misfit(from_count(7 * BILLION), config, gpus(4, 20 * GIB), most_ranks=4, planned={"pipe": 1})
    bare = replace(from_count(7 * BILLION), architecture=None)
    refuse_misfit(bare, config, gpus(4, 20 * GIB), most_ranks=4)


def test_a_host_is_held_to_what_all_its_stages_have(config: str) -> None:
    """Of 24 blocks one stage has 21, and three have one each: together as much as the model, and no more."""
    host = Machine(label="cpu", ranks=4, ranks_per_host=4, host_memory_bytes=40 * GIB)
    _with(config, pipeline={"stages": 4, "partition": [0, 1, 2, 3, 22]}, gradient_accumulation_steps=4)
    model = from_count(BILLION)
    assert model.architecture is not None
    refuse_misfit(model, config, host, most_ranks=4)


def test_bounds_of_stages_are_those_of_blocks_in_what_would_fit_too(config: str) -> None:
    _with(config, pipeline={"stages": 4, "partition": [0, 8, 16, 24, 32]}, gradient_accumulation_steps=4)
    with pytest.raises(UsageError, match="cannot fit at stage 0"):
        refuse_misfit(from_count(7 * BILLION), config, gpus(4, 20 * GIB), most_ranks=4)
