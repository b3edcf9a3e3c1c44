"""Words of other launchers, typed at dsrun: each does what it says, or is refused with the way of dsrun."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from dsrun.launcher.cli import VERBS, app
from dsrun.launcher.commands.run import command
from dsrun.launcher.plan.foreign_options import INSTEAD, SPELLINGS, VERBS_INSTEAD
from support.cli import invoke


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("raise AssertionError('started')\n")
    (tmp_path / "hosts").write_text("w[0-3] slots=4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def slots(*args: str) -> dict[str, int]:
    """Ranks by host that a command line would start."""
    result = invoke("--dry-run", "--json", *args, "train.py")
    assert result.exit_code == 0, result.stderr
    return {node["host"]["name"]: len(node["workers"]) for node in json.loads(result.stdout)["nodes"]}


def test_deepspeeds_command_line_starts_what_it_says() -> None:
    assert slots("--hostfile", "hosts", "--num_nodes", "2", "--num_gpus=3") == {"w0": 3, "w1": 3}
    assert slots("--hostfile=hosts", "--include", "w1@w2:0,2") == {"w1": 4, "w2": 2}
    assert slots("-H", "hosts", "-e", "w0@w3:1") == {"w1": 4, "w2": 4, "w3": 3}
    assert slots("--num_accelerators", "3") == {"localhost": 3}
    assert slots("--num-gpus", "3") == {"localhost": 3}


def test_the_scripts_own_words_keep_their_spelling() -> None:
    plan = json.loads(invoke("--dry-run", "--json", "train.py", "--num_gpus", "3", "--nnodes", "2").stdout)
    assert plan["program"]["args"] == ["--num_gpus", "3", "--nnodes", "2"]


@pytest.mark.parametrize("word", sorted(INSTEAD))
def test_what_means_something_else_is_refused_with_the_way_of_dsrun(word: str) -> None:
    result = invoke(word, "2", "train.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: `dsrun run` has no option `{word}`\nhint: {INSTEAD[word]}\n"


@pytest.mark.parametrize(
    ("words", "option", "way_out"),
    [
        ("-np 2", "-np", "`-n N` is the number of ranks on each host, not in total"),
        ("-np=2", "-np", "`-n N` is the number of ranks on each host, not in total"),
        ("--np 2", "--np", "`-n N` is the number of ranks on each host, not in total"),
        ("-npernode 2", "-npernode", "`-n N` is the number of ranks on each host"),
        ("--nproc_per_node 2", "--nproc_per_node", "`-n N` is the number of ranks on each host"),
        ("--nnodes=2", "--nnodes", "`-H FILE` names the hosts, and `--nodes N` takes the first N"),
        ("--num-processes 2", "--num-processes", "`-n N` is the number of ranks on each host, not in total"),
        (
            "--gpus 2",
            "--gpus",
            "`-n N` is the number of ranks on each host, one on each GPU; `--include localhost:0,2` chooses GPUs",
        ),
        ("-host w0", "-host", INSTEAD["--hosts"]),
        ("-q -hostfile hosts", "-hostfile", "`-H FILE` reads MPI's `host:4` too"),
        ("-x FOO", "-x", "`--env NAME=VALUE` sets a variable, `--env NAME` copies it"),
        ("-n 2 -wdir /tmp", "-wdir", "`--workdir DIR` is where ranks start"),
        ("--deepspeed_config ds.json", "--deepspeed_config", "`--config FILE` names the training config"),
    ],
)
def test_words_of_each_launcher_are_known_in_each_of_their_spellings(words: str, option: str, way_out: str) -> None:
    result = invoke(*words.split(), "train.py")
    assert result.stderr == f"error: `dsrun run` has no option `{option}`\nhint: {way_out}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        # The script's own words are nobody's mistake.
        ("-p 1 train.py -np 2", "error: `dsrun run` has no option `-p`\nhint: see `dsrun run --help`"),
        ("-n 0 train.py -np 2", "error: `-n/--ranks-per-host`: expected a number of ranks"),
        ("--ranks-per-host 0 train.py -np 2", "error: `-n/--ranks-per-host`: expected a number of ranks"),
        # As unlike as these are, one is no slip for the other.
        ("--rpm 2 train.py", "error: `dsrun run` has no option `--rpm`\nhint: see `dsrun run --help`"),
        ("--hostfle h train.py", "error: `dsrun run` has no option `--hostfle`\nhint: did you mean `--hostfile`?"),
    ],
)
def test_other_mistakes_are_not_taken_for_words_of_another_launcher(words: str, told: str) -> None:
    assert invoke(*words.split()).stderr.startswith(told)


@pytest.mark.parametrize("before", [[], ["run"], ["slurm"]])
def test_they_are_refused_wherever_a_run_is_typed(before: list[str]) -> None:
    result = invoke(*before, "--nproc-per-node=4", "train.py")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: `dsrun run` has no option `--nproc-per-node`\nhint: `-n N` is the number of ranks on each host\n",
    )


def test_spellings_lead_to_options_that_are_there_and_refused_words_are_none() -> None:
    options = {name for option in command.params if isinstance(option, click.Option) for name in option.opts}
    assert {f"--{ours}" for ours in SPELLINGS.values()} <= options
    assert options.isdisjoint(INSTEAD)
    assert {verb for verb in VERBS_INSTEAD.values() if not verb.startswith("--")} <= set(VERBS)
    assert set(VERBS).isdisjoint(VERBS_INSTEAD)
    assert isinstance(app, click.Group)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--num_gpus", "0"], "error: `-n/--ranks-per-host`: expected a number of ranks from 1 to 4096, got `0`"),
        (["--node_rank", "0"], "error: `--node-rank` without `--nodes N`"),
        (["--master_port", "29501"], "error: `--master-port` without `--nodes N`"),
        (["--num_nodes", "2", "--machine_rank", "1"], "error: `--node-rank` without `--master-addr ADDR`"),
        (["--num_gpus", "2", "--include", "localhost"], "error: `-n 2` and `--include` cannot be used together"),
    ],
)
def test_mistakes_are_told_in_our_spelling(args: list[str], told: str) -> None:
    result = invoke(*args, "train.py")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (2, told)
