from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.base import Channel
from dsrun.launcher.transport.srun import SrunTransport, step_command, step_environment

HOST = HostSpec(name="n2", slots=1, source="Slurm job 7")
#: Does what srun does with its words: options first, then the task's command; after what a prologue may print.
RUNS = """
while [ "${1#--}" != "$1" ]; do shift; done
echo "a word of the site's prologue"
echo "srun: cluster configuration lacks support for cpu binding" >&2
export SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=4 SLURM_CPU_BIND=quiet,none
exec "$@"
"""


def fake_srun(folder: Path, script: str) -> SrunTransport:
    program = folder / "srun"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "MINE": "é\n"}
    return SrunTransport(environ=environ, program=str(program))


def all_of(channel: Channel) -> tuple[bytes, bytes, int | None]:
    channel.end_input()
    out = b"".join(iter(channel.read_stdout, b""))
    error = b"".join(iter(channel.read_stderr, b""))
    return out, error, channel.wait(20)


def test_a_command_gets_its_words_as_they_are_and_its_output_comes_alone(tmp_path: Path) -> None:
    words = ["$HOME", "a b", "", "*", "'\"", "é\n"]
    channel = fake_srun(tmp_path, RUNS).start(HOST, ["sh", "-c", 'printf "%s|" "$@"; echo said >&2', "sh", *words])
    assert all_of(channel) == ("".join(f"{word}|" for word in words).encode(), b"said\n", 0)


def test_what_is_sent_arrives_and_the_status_comes_back(tmp_path: Path) -> None:
    channel = fake_srun(tmp_path, RUNS).start(HOST, ["sh", "-c", "cat; exit 75"])
    channel.send(b"to the task\n")
    assert all_of(channel) == (b"to the task\n", b"", 75)


def test_a_task_that_died_by_a_signal_is_told_from_one_that_failed(tmp_path: Path) -> None:
    channel = fake_srun(tmp_path, RUNS).start(HOST, ["sh", "-c", "exit 137"])
    assert all_of(channel)[2] == -9


def test_a_command_inherits_the_job(tmp_path: Path) -> None:
    channel = fake_srun(tmp_path, RUNS).start(HOST, ["env"])
    seen = all_of(channel)[0].decode().splitlines()
    assert {"SLURM_JOB_ID=7", "SLURM_ARRAY_TASK_ID=3", "MINE=é"} <= set(seen)


def test_a_refusal_comes_in_slurms_own_words(tmp_path: Path) -> None:
    refuses = "echo 'srun: error: Unable to create step for job 7: Requested nodes are busy' >&2; exit 1"
    with pytest.raises(LaunchError) as caught:
        fake_srun(tmp_path, refuses).start(HOST, ["true"])
    said = "host n2: srun has started nothing there: Unable to create step for job 7: Requested nodes are busy"
    assert str(caught.value) == said
    assert caught.value.hint is not None


def test_a_missing_srun_is_named_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        SrunTransport(environ={}, program=str(tmp_path / "srun")).start(HOST, ["true"])
    assert "no such file" in str(caught.value)
    assert caught.value.hint is not None
    assert "-H FILE" in caught.value.hint


def test_a_step_is_confined_to_nothing_and_asks_for_all_gpus_of_the_job() -> None:
    words = step_command("srun", "n2", gpus="--gres=gpu:4")
    assert {"--overlap", "--mem=0", "--cpu-bind=none", "--gres=gpu:4", "--gpu-bind=none", "--export=ALL"} <= set(words)
    assert "--nodelist=n2" in words
    assert not [word for word in step_command("srun", "n2", gpus=None) if "gpu" in word]


def test_what_the_job_was_asked_for_is_not_asked_for_the_step() -> None:
    job = {"SLURM_NTASKS": "8", "SLURM_GPUS_PER_TASK": "1", "SLURM_MEM_PER_CPU": "100", "SRUN_CPUS_PER_TASK": "2"}
    job |= {"SLURM_EXPORT_ENV": "NONE", "SLURM_CPU_BIND_TYPE": "cores", "SLURM_TRES_PER_TASK": "gres/gpu:1"}
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_NAME": "train", "SLURM_ARRAY_TASK_ID": "1"}
    kept |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CLUSTERS": "a", "HOME": "/root", "MY_SLURM_NTASKS": "8"}
    assert step_environment(job | kept) == kept
