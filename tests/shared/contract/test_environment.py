from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsrun.contract.environment import (
    DEFAULT_HANG_TIMEOUT_S,
    GROUP_TIMEOUT_ENV,
    RankInfo,
    WorkerError,
    group_timeout_after,
    group_timeout_s,
    read_error_file,
    resume_folder,
    store_nonce,
    write_error_file,
)
from dsrun.errors import InputError, ModelError


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


def test_an_error_file_says_what_was_raised_and_where(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        write_error_file(path, error)
    found = read_error_file(path)
    assert found is not None
    assert found.message == "ValueError: no such thing"
    assert 'raise ValueError("no such thing")' in found.traceback
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_mistake_in_the_input_is_written_with_its_hint_and_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(path, ModelError("nothing to train", hint="unfreeze"))
    found = read_error_file(path)
    assert found is not None
    assert (found.message, found.traceback) == ("error: nothing to train\nhint: unfreeze", "")
    assert found.exit_code == ModelError.exit_code == 2


def test_an_error_file_says_the_code_that_the_process_would_end_with(tmp_path: Path) -> None:
    for name, error, code, expected in (
        ("1", ValueError("x"), None, 1),
        ("2", InputError("command: cannot run"), 127, 127),
    ):
        write_error_file(tmp_path / name, error, exit_code=code)
        found = read_error_file(tmp_path / name)
        assert found is not None
        assert found.exit_code == expected


def test_the_first_error_of_a_rank_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(path, ValueError("first"))
    write_error_file(path, ValueError("second"))
    found = read_error_file(path)
    assert found is not None
    assert found.message == "ValueError: first"


def test_the_error_file_that_torchs_record_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1700000000.25"}
    path.write_text(json.dumps({"message": {"message": "RuntimeError: x", "extraInfo": extra}}))
    assert read_error_file(path) == WorkerError(
        message="RuntimeError: x", traceback="Traceback ...", time_s=1700000000.25
    )


def test_a_word_of_torchs_record_is_signed_and_otherwise_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1700000000"}
    path.write_text(json.dumps({"message": {"message": "RuntimeError: x", "extraInfo": extra}}))
    os.utime(path, (1700000000.5, 1700000000.5))
    write_error_file(path, RuntimeError("x"))
    assert read_error_file(path) == WorkerError(
        message="RuntimeError: x", traceback="Traceback ...", time_s=1700000000.5, pid=os.getpid()
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"message": 3}', b"\xff"])
def test_what_is_no_word_is_not_signed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert not write_error_file(path, ValueError("x"))
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"message": 3}', b'{"message": {}}', b"\xff"])
def test_a_damaged_error_file_is_no_error_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert read_error_file(path) is None
    assert read_error_file(tmp_path / "absent") is None
