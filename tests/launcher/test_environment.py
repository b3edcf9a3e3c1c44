from __future__ import annotations

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.environment import job_environment, masked, parse_env_options, thread_environment


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


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1"), (1, 1, "1")])
def test_cores_are_shared_among_the_ranks_of_a_host(cores: int, ranks: int, threads: str) -> None:
    assert thread_environment(usable_cores=cores, local_ranks=ranks, given={}) == {"OMP_NUM_THREADS": threads}


def test_a_thread_count_the_user_set_is_kept() -> None:
    assert thread_environment(usable_cores=8, local_ranks=2, given={"OMP_NUM_THREADS": "7"}) == {}


def test_config_and_backend_reach_workers_only_if_there_are_any() -> None:
    assert job_environment(user={"A": "1"}, config=None, backend=None) == {"A": "1"}
    assert job_environment(user={}, config="/c.json", backend="gloo") == {
        "DSRUN_CONFIG": "/c.json",
        "DSRUN_BACKEND": "gloo",
    }


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password"])
def test_secrets_are_not_shown(name: str) -> None:
    assert masked(name, "s3cret") == "***"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "KEYBOARD", "TOKENIZERS_PARALLELISM", "DSRUN_CONFIG"])
def test_other_variables_are_shown(name: str) -> None:
    assert masked(name, "4") == "4"
