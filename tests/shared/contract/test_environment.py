from __future__ import annotations

import pytest

from dsrun.contract.environment import (
    DEFAULT_HANG_TIMEOUT_S,
    ENGINE_ENV,
    GROUP_TIMEOUT_ENV,
    PLANNED_AXES_ENV,
    RankInfo,
    group_timeout_after,
    group_timeout_s,
    has_made_engine,
    is_first_rank,
    note_engine,
    planned_axes,
    resume_folder,
    store_nonce,
    write_planned_axes,
)
from dsrun.errors import InputError


def test_a_rank_reads_back_the_environment_it_was_given() -> None:
    info = RankInfo(
        rank=5,
        world_size=7,
        local_rank=1,
        local_world_size=3,
        node_rank=2,
        node_count=3,
        master_addr="10.0.0.1",
        master_port=29511,
        agent_store=True,
    )
    assert RankInfo.from_env(info.to_env()) == info


def test_the_environment_has_every_variable_that_torchrun_sets_for_a_rank() -> None:
    torchruns = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE"
    torchruns += " ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE"
    assert set(torchruns.split()) <= RankInfo().to_env().keys()


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    assert RankInfo.from_env({}) == RankInfo(rank=0, world_size=1)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "1"}, "environment: RANK is '1' but WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
        ({"RANK": "x"}, "environment: RANK is 'x'; expected a whole number"),
        ({"RANK": "2"}, "environment: RANK is 2; expected at least 0 and at most 1"),
        ({"WORLD_SIZE": "0"}, "environment: WORLD_SIZE is 0; expected at least 1"),
        ({"MASTER_PORT": ""}, "environment: MASTER_PORT is ''; expected a whole number"),
    ],
)
def test_an_incomplete_or_impossible_environment_is_refused(env: dict[str, str], message: str) -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    given = env if env == {"RANK": "1"} else whole | env
    with pytest.raises(InputError) as caught:
        RankInfo.from_env(given)
    assert str(caught.value) == message


def test_the_nonce_counts_only_at_the_store_of_the_job_that_set_it() -> None:
    ours = {"DSRUN_NONCE": "n", "DSRUN_JOB_ID": "job", "TORCHELASTIC_RUN_ID": "job"}
    assert store_nonce(ours) == "n"
    assert store_nonce(ours | {"TORCHELASTIC_RUN_ID": "a torchrun inside the job"}) is None
    assert store_nonce({"TORCHELASTIC_RUN_ID": "job"}) is None


def test_a_job_that_was_started_again_names_the_checkpoint_it_goes_on_from() -> None:
    assert resume_folder({"DSRUN_RESUME": "/ckpt/step4"}) == "/ckpt/step4"
    assert resume_folder({}) is None


@pytest.mark.parametrize("hang_timeout_s", [1.0, 60.0, DEFAULT_HANG_TIMEOUT_S, 4 * 3600.0])
def test_groups_wait_well_longer_than_a_hang_takes_to_be_told_and_never_less_than_by_default(
    hang_timeout_s: float,
) -> None:
    waits_s = group_timeout_after(hang_timeout_s)
    assert waits_s >= hang_timeout_s + 300
    assert waits_s >= group_timeout_s({}) == 2400


def test_ranks_wait_as_long_as_the_launcher_says() -> None:
    assert group_timeout_s({GROUP_TIMEOUT_ENV: "9600.5"}) == 9600.5


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_wait_that_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match=f"DSRUN_GROUP_TIMEOUT is '{text}'"):
        group_timeout_s({GROUP_TIMEOUT_ENV: text})


def test_an_engine_counts_for_the_process_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINE_ENV, "1")
    assert not has_made_engine()  # of a parent
    note_engine()
    assert has_made_engine()


def test_the_first_rank_is_rank_0_of_any_launcher_or_a_lone_process() -> None:
    assert [is_first_rank({}), is_first_rank({"RANK": "0"}), is_first_rank({"RANK": "1"})] == [True, True, False]
    open_mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert not is_first_rank(open_mpi | {"OMPI_COMM_WORLD_RANK": "1"})


def test_planned_sizes_of_axes_are_read_as_they_were_written() -> None:
    sizes = {"pipe": 2, "tensor": 4}
    assert write_planned_axes(sizes) == "pipe=2,tensor=4"
    assert planned_axes({PLANNED_AXES_ENV: write_planned_axes(sizes)}) == sizes
    assert planned_axes({}) == planned_axes({PLANNED_AXES_ENV: ""}) == {}


@pytest.mark.parametrize("text", ["tensor", "tensor=", "=2", "tensor=0", "tensor=x", "tensor=2,", "tensor=2,tensor=4"])
def test_what_holds_no_sizes_of_axes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"DSRUN_PLANNED_AXES is .*; expected sizes above 0 like 'pipe=2,tensor=4'"):
        planned_axes({PLANNED_AXES_ENV: text})
