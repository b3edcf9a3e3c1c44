from __future__ import annotations

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.machine.software.versions import telling_variables
from dsrun.launcher.plan.environment import (
    RESERVED,
    interface_variables,
    job_environment,
    parse_env_options,
    passed_on,
)


def test_a_value_is_taken_as_it_stands_and_a_lone_name_is_copied() -> None:
    options = ["A=1", "B", "C=", "D=x=y", "E= $HOME;`id`\n", "A=2"]
    assert parse_env_options(options, environ={"B": "here"}) == {
        "A": "2",
        "B": "here",
        "C": "",
        "D": "x=y",
        "E": " $HOME;`id`\n",
    }


def test_every_bad_variable_is_reported_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_env_options(["MISSING", "=1", "RANK=3", "DSRUN_CONFIG=x", "DSRUN_BACKEND=gloo"], environ={})
    assert caught.value.render() == (
        "error: `--env MISSING` copies a variable that is not set here\n"
        "hint: write `--env MISSING=VALUE`\n"
        "error: `--env` has no name\n"
        "hint: write `--env NAME=VALUE`, or `--env NAME` to copy its value from here\n"
        "error: `--env RANK` is dsrun's to set\n"
        "hint: use a name of your own\n"
        "error: `--env DSRUN_CONFIG` is dsrun's to set\n"
        "hint: use `--config FILE`\n"
        "error: `--env DSRUN_BACKEND` is dsrun's to set\n"
        "hint: use `--backend nccl` or `--backend gloo`"
    )


@pytest.mark.parametrize("name", ["DSRUN_NONCE", "DSRUN_RESUME", "DSRUN_HEARTBEAT", "DSRUN_STACKS", "MASTER_ADDR"])
def test_what_ties_a_rank_to_its_job_cannot_be_set(name: str) -> None:
    with pytest.raises(UsageError, match=f"`--env {name}` is dsrun's to set"):
        parse_env_options([f"{name}=1"], environ={})


def test_a_job_that_shall_go_on_from_a_checkpoint_is_shown_the_way() -> None:
    with pytest.raises(UsageError) as caught:
        parse_env_options(["DSRUN_RESUME=/ckpt/step8"], environ={})
    assert caught.value.hint is not None
    assert "`--max-restarts N`" in caught.value.hint


def test_config_and_backend_reach_workers_only_if_there_are_any() -> None:
    assert job_environment(user={"A": "1"}, config=None, backend=None) == {"A": "1"}
    assert job_environment(user={}, config="/c.json", backend="gloo") == {
        "DSRUN_CONFIG": "/c.json",
        "DSRUN_BACKEND": "gloo",
    }


def test_other_hosts_get_the_settings_of_libraries_and_nothing_of_this_machine_or_person() -> None:
    passed = {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTHONPATH": "/src", "OMP_NUM_THREADS": "2"}
    kept = {
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTHONHOME": "/opt",
        "WANDB_API_KEY": "secret",
        "HOME": "/root",
        "LD_LIBRARY_PATH": "/opt/lib",
        # Of the job that this one was started in.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "RANK": "3",
        "DSRUN_JOB_ID": "j",
    }
    assert passed_on({**passed, **kept}).items() >= passed.items()
    assert passed_on(kept).keys().isdisjoint({"CUDA_VISIBLE_DEVICES", "PYTHONHOME", "WANDB_API_KEY", "RANK"})
    assert not passed_on(kept).keys() & RESERVED


@pytest.mark.parametrize(
    "name",
    [
        *("FI_PROVIDER", "OFI_NCCL_PROTOCOL", "NVSHMEM_BOOTSTRAP", "NVTE_FLASH_ATTN", "TRITON_PRINT_AUTOTUNING"),
        *("CUDNN_LOGINFO_DBG", "KMP_AFFINITY", "GOMP_SPINCOUNT", "SHARP_COLL_LOG_LEVEL", "CUBLASLT_LOG_LEVEL"),
        *("NVIDIA_TF32_OVERRIDE", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "TORCHDYNAMO_DISABLE"),
        *("TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "PYTHONPATH"),
    ],
)
def test_what_changes_results_or_must_agree_goes_to_all_hosts_and_is_told_by_the_probe(name: str) -> None:
    assert passed_on({name: "1"}) == {name: "1"}
    assert telling_variables({name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    "name", ["TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_PTXAS_PATH", "NCCL_HOME", "NVSHMEM_HOME", "FI_PROVIDER_PATH"]
)
def test_folders_in_which_libraries_lie_here_are_not_sent(name: str) -> None:
    assert passed_on({name: "/opt/x"}) == {}


def test_nccl_takes_an_interface_by_its_whole_name() -> None:
    assert interface_variables("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert interface_variables("eth1", ("eth1", "eth2")) == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1,eth2",
    }
