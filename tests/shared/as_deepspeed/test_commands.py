"""DeepSpeed's commands on dsrun: what each command line means, who gets which word, and the files that a save leaves.

The lines, with what DeepSpeed's own parser makes of them, stand in fixtures/deepspeed_commands.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsrun.as_deepspeed.commands.exported import exported_files, read_exported
from dsrun.as_deepspeed.commands.options import parse
from dsrun.as_deepspeed.commands.runner import EXPORT_ENVS, prepare, shown
from dsrun.as_deepspeed.commands.tools import REFUSED
from dsrun.as_deepspeed.commands.translate import Translation
from dsrun.as_deepspeed.search_path import BIN, variables
from dsrun.as_deepspeed.version import STANDARD
from dsrun.as_deepspeed.weights_script import TEXT, leave_script
from dsrun.errors import DsrunError, UsageError
from support import clients
from support.cli import Result, clean_environment, invoke
from support.forked_programs import run_programs

FIXTURE: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "deepspeed_commands" / "commands.json").read_text()
)
COMMANDS: list[dict[str, Any]] = FIXTURE["commands"]
HOSTFILES = {
    "hosts": "".join(f"w{number} slots=4\n" for number in range(4)),
    "one": "w0 slots=4\n",
    "here": "localhost slots=4\n",
    "uneven": "w0 slots=4\nw1 slots=2\n",
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the command lines name; the machine has no GPU, and nothing else around it."""
    for name, text in HOSTFILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text("print('trains')\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "train.py").touch()
    (tmp_path / "program.sh").write_text('#!/bin/sh\necho "$RANK: $@"\n')
    (tmp_path / "program.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def translated(words: str) -> Translation:
    return prepare(parse(shlex.split(words)))


def run(*words: str, cwd: Path, timeout_s: float = 120, **changes: str) -> Result:
    """Runs a command in PATH as one whose `deepspeed` is dsrun."""
    environ = clean_environment(XDG_STATE_HOME=str(cwd / "state"), CUDA_VISIBLE_DEVICES="", **changes)
    environ |= variables(environ, STANDARD)
    command = shutil.which(words[0], path=environ["PATH"])
    assert command is not None, f"{words[0]} is not in PATH"
    done = subprocess.run(
        [command, *words[1:]], cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_command_lines_are_read_as_by_deepspeeds_own_parser() -> None:
    assert len(COMMANDS) >= 60
    defaults = FIXTURE["defaults"]
    differ: dict[str, Any] = {}
    for row in COMMANDS:
        upstream = row["upstream"]
        try:
            found = asdict(parse(shlex.split(row["words"])))
        except UsageError as error:
            is_alike = isinstance(upstream, str)
            differ |= {} if is_alike else {row["words"]: error.render()}
            continue
        expected = {**defaults, **upstream} if isinstance(upstream, dict) else upstream
        differ |= {} if found == expected else {row["words"]: (found, expected)}
    assert differ == {}


def test_each_command_line_is_dsruns_with_the_same_meaning_or_refused_with_the_way_out(work: Path) -> None:
    python = str(Path(sys.executable).parent)
    differ: dict[str, Any] = {}
    for row in COMMANDS:
        expected = {name: row[name] for name in ("ours", "refused", "notes") if name in row}
        found: dict[str, Any] = {}
        try:
            translation = translated(row["words"])
            found["ours"] = shlex.join(translation.words)
            if translation.notes:
                found["notes"] = list(translation.notes)
        except DsrunError as error:
            found["refused"] = error.render().replace(python, "{python}").splitlines()
        differ |= {} if found == expected else {row["words"]: (found, expected)}
    assert differ == {}


def test_dsrun_accepts_each_command_line_that_is_not_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [row for row in COMMANDS if "ours" in row]
    assert len(ours) > 45
    differ: dict[str, Any] = {}
    for row in ours:
        verb, *words = shlex.split(row["ours"])
        if "srun" in words:
            monkeypatch.setenv("SLURM_JOB_ID", "7")
        done = invoke(verb, "--dry-run", *words)
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        # Of what is not on this machine, a GPU or another host, dsrun says so, as DeepSpeed does.
        expected = (2, row["dry_run"]) if "dry_run" in row else (0, "")
        found = (done.exit_code, done.stderr.partition("\n")[0] if done.exit_code else "")
        differ |= {} if found == expected else {row["words"]: done.stderr}
    assert differ == {}


def test_gpus_that_a_filter_counts_are_all_of_the_machine_as_in_deepspeed(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert translated("--include localhost:0 train.py").unset == ("CUDA_VISIBLE_DEVICES",)
    counted = translated("--num_gpus 2 train.py")
    assert (counted.unset, counted.notes) == (
        (),
        ("CUDA_VISIBLE_DEVICES=2,3 is obeyed beside --num_gpus; DeepSpeed would take the first GPUs of the machine",),
    )
    assert translated("train.py").notes == ()
    assert translated("--hostfile hosts --include w0:0@w1 train.py").unset == ()


def test_cores_are_those_of_the_list_and_an_environment_of_ones_own_needs_no_script(work: Path) -> None:
    assert translated("--bind_cores_to_rank --bind_core_list 0-2,8 train.py").cores == (0, 1, 2, 8)
    own = Path(sys.executable).parent / "activate"
    assert translated(f"--hostfile hosts --venv_script {own} train.py").notes == ()


def test_a_job_of_a_scheduler_gives_no_hosts_unasked(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "nodes").write_text("w0\nw1\n")
    monkeypatch.setenv("PBS_JOBID", "7")
    monkeypatch.setenv("PBS_NODEFILE", str(work / "nodes"))
    assert translated("--no_local_rank train.py").words == ("run", "--as-deepspeed", "--nodes", "1", "train.py")


@pytest.fixture
def exported(work: Path) -> Iterator[Path]:
    """What accelerate leaves after two launches of a rank of dsrun, and a hand-written file in the home."""
    lines = "A=1\nPATH=/opt/bin:/bin\nEMPTY=\nDSRUN_AS_DEEPSPEED=0.19.8\nWORLD_SIZE=2\nTOKEN=x==y\n"
    (work / ".deepspeed_env").write_text(lines + lines.replace("A=1", "A=2"))
    (work / "home").mkdir()
    (work / "home" / ".deepspeed_env").write_text("# ours\nexport B='$HOME b'\n\nA=0\n")
    before = dict(os.environ)
    yield work
    os.environ.clear()
    os.environ.update(before)


def test_variables_of_the_file_go_to_ranks_of_several_hosts_by_name_alone(
    exported: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = parse(["--hostfile", "hosts", "--no_local_rank", "train.py", "--secret", "x"])
    several = prepare(options)
    names = ["A", "B", "EMPTY", "PATH", "TOKEN"]
    where = [several.words[at + 1] for at, word in enumerate(several.words) if word == "--env"]
    assert sorted(where) == names
    assert {name: os.environ[name] for name in names} == {
        "A": "2",
        "B": "$HOME b",
        "EMPTY": "",
        "PATH": "/opt/bin:/bin",
        "TOKEN": "x==y",
    }
    assert (
        capfd.readouterr().err == "dsrun: deepspeed: .deepspeed_env: dsrun's to set: DSRUN_AS_DEEPSPEED, WORLD_SIZE\n"
    )
    line = "dsrun run --as-deepspeed --hostfile hosts --env ... (5 variables) train.py ..."
    assert shown(several.words, options) == line
    plan = invoke(several.words[0], "--dry-run", *several.words[1:])
    assert plan.exit_code == 0, plan.stderr


def test_variables_of_the_file_are_not_for_one_host_alone(exported: Path) -> None:
    for words in ("train.py", "--hostfile one train.py", "--hostfile hosts --no_ssh --node_rank 1 train.py"):
        assert "A" not in translated(f"{words} A --quiet").words[:-2], words
        assert "A" not in os.environ


def test_variables_that_a_script_adds_to_the_list_go_to_ranks_of_several_hosts(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (exported / ".deepspeed_env").write_text("MLFLOW_RUN=of the file\n")
    values = {"MLFLOW_RUN": "here", "WANDB_API_KEY": "secret", "PYTHONHASHSEED": "0", "WORLD_SIZE_HINT": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    words = ["--hostfile", "hosts", "--no_local_rank", "train.py"]

    def sent(words: Sequence[str]) -> list[str]:
        found = prepare(parse(words)).words
        return sorted(found[at + 1] for at, word in enumerate(found) if word == "--env")

    assert sent(words) == ["A", "B", "MLFLOW_RUN"]  # PYTHON... is what dsrun sends unasked
    # As gpt-neox's launcher does, by `deepspeed.launcher.runner.EXPORT_ENVS`.
    EXPORT_ENVS.append("WANDB_API_KEY")
    try:
        assert sent(words) == ["A", "B", "MLFLOW_RUN", "WANDB_API_KEY"]
        assert sent(["--no_local_rank", "train.py"]) == []
    finally:
        EXPORT_ENVS.remove("WANDB_API_KEY")
    assert os.environ["MLFLOW_RUN"] == "of the file"


def test_a_file_of_variables_that_others_can_write_or_a_shell_would_expand_is_refused(work: Path) -> None:
    path = work / ".deepspeed_env"
    path.write_text("A=1\nno variable\nPATH=$PATH:/x\n")
    with pytest.raises(UsageError) as caught:
        read_exported(exported_files(".deepspeed_env", home=work, folder=work))
    assert [one.message for one in caught.value.problems] == [
        f"{path}:2: this is no variable",
        f"{path}:3: the value of `PATH` has what a shell would expand, and no shell reads it",
    ]
    path.write_text("A=1\n")
    path.chmod(0o664)  # the umask of many, with which accelerate makes it
    assert read_exported([path]) == ({"A": "1"}, [])
    path.chmod(0o666)
    with pytest.raises(UsageError, match="others than you can write this file"):
        read_exported([path])


def test_commands_run_with_the_interpreter_of_the_job_and_the_report_says_what_deepspeed_is(tmp_path: Path) -> None:
    assert all(os.access(path, os.X_OK) for path in Path(BIN).iterdir())
    report = run("ds_report", cwd=tmp_path)
    assert report.exit_code == 0, report.stderr
    head, *_ = report.stdout.splitlines()
    assert head.startswith("deepspeed is dsrun 0.2.0: 0.19.8+dsrun by its metadata, in ")
    assert "\ncpu " in report.stdout
    short = run("dsr", cwd=tmp_path)
    assert short.stdout.splitlines()[:3] == report.stdout.splitlines()[:3]
    for name in REFUSED:
        refused = run(name, "x", cwd=tmp_path)
        assert (refused.exit_code, refused.stdout) == (2, ""), name
        assert refused.stderr.startswith(f"error: {name}: "), name
        assert "\nhint: " in refused.stderr, name
    wrong = run("ds", "--numgpus", "2", "train.py", cwd=tmp_path)
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: deepspeed: there is no option `--numgpus`\nhint: did you mean `--num_gpus`?\n"


def test_programs_that_are_not_python_get_the_local_rank_and_those_they_start_do_not(work: Path) -> None:
    (work / "program.sh").write_text('#!/bin/sh\necho "$RANK: $*, $DSRUN_LOCAL_RANK_WORD"\n')
    done = run("deepspeed", "--num_gpus", "2", "--no_python", "./program.sh", "a b", cwd=work)
    assert sorted(done.stdout.splitlines()) == ["[0] 0: --local_rank=0 a b, ", "[1] 1: --local_rank=1 a b, "], done
    assert (
        "runs `dsrun run --as-deepspeed --ranks-per-host 2 --no-python --env DSRUN_LOCAL_RANK_WORD=--local_rank "
        "./program.sh ...`" in done.stderr
    )
    module = (sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--no_local_rank", "--no_python")
    again = run(*module, "./program.sh", "a", cwd=work)
    assert (again.stdout, again.exit_code) == ("[0] 0: a, \n", 0), again.stderr


#: As programs for DeepSpeed are written; a parameter that is not trained, one that is tied, and buffers of two kinds.
SAVES = """
import argparse, os, sys
import deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--out")
args = parser.parse_args()
assert args.local_rank == int(os.environ["LOCAL_RANK"]) and sys.argv[1] == f"--local_rank={args.local_rank}"
assert "DSRUN_LOCAL_RANK_WORD" not in os.environ
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
model[1].weight.requires_grad_(False)
model[3].weight = model[0].weight
model.register_buffer("steps", torch.arange(3))
model.register_buffer("scale", torch.ones(2))
engine, *_ = deepspeed.initialize(
    model=model,
    config={
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    },
)
for _ in range(2):
    engine.backward(engine(torch.randn(2, 16).bfloat16()).float().sum())
    engine.step()
    engine.save_checkpoint(args.out)
masters = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters() if p.requires_grad}
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    masters["1.weight"] = model[1].weight.detach().float()
if engine.global_rank == 0:
    torch.save({name: value.clone() for name, value in masters.items()}, args.out + "/expected.pt")
"""


@pytest.mark.timeout(600)
def test_a_save_leaves_the_script_that_writes_whole_fp32_weights(work: Path) -> None:
    (work / "saves.py").write_text(SAVES)
    preloading = clients.preloading("torch._dynamo", "support.preloaded")
    done = run("deepspeed", "--num_gpus", "2", "saves.py", "--out", "saved", cwd=work, **preloading)
    assert done.exit_code == 0, done.stdout + done.stderr
    saved = work / "saved"
    assert (saved / "zero_to_fp32.py").read_text() == TEXT
    assert (saved / "latest").read_text() == "global_step2"
    expected = torch.load(saved / "expected.pt")
    # With plain python, in the folder of the checkpoint, as DeepSpeed's users do.
    made = run(sys.executable, "zero_to_fp32.py", ".", "../whole", cwd=saved)
    assert made.exit_code == 0, made.stderr
    start = f"import os, runpy, sys; os.chdir({str(saved)!r}); sys.argv = ['zero_to_fp32.py', '.', *{{}}]\n"
    start += "runpy.run_path('zero_to_fp32.py', run_name='__main__')"
    more = (
        ("../safe", "--safe_serialization", "--max_shard_size", "1KB", "-t", "global_step2"),
        ("../trained", "--max_shard_size", "1.5KB", "--exclude_frozen_parameters", "-d"),
    )
    for ended in run_programs([start.format(words) for words in more]):
        assert ended.code == 0, ended.err
    whole = torch.load(work / "whole" / "pytorch_model.bin")
    assert expected.keys() == whole.keys() - {"steps", "scale", "3.weight"}
    assert all(torch.equal(whole[name], value) for name, value in expected.items())
    assert {name: value.dtype for name, value in whole.items() if value.dtype != torch.float32} == {
        "steps": torch.int64
    }
    assert torch.equal(whole["3.weight"], whole["0.weight"])
    safe = [load_file(path) for path in sorted((work / "safe").glob("model-*-of-*.safetensors"))]
    assert len(safe) > 2
    assert {name: value.tolist() for part in safe for name, value in part.items()} == {
        name: value.tolist() for name, value in whole.items() if name != "3.weight"
    }
    index = json.loads((work / "trained" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert index.keys() == whole.keys() - {"1.weight"}
    assert all(torch.equal(torch.load(work / "trained" / file)[name], whole[name]) for name, file in index.items())


def test_the_script_names_what_is_wrong(tmp_path: Path) -> None:
    leave_script(tmp_path / "saved")
    before = (tmp_path / "saved" / "zero_to_fp32.py").stat()
    leave_script(tmp_path / "saved")
    assert (tmp_path / "saved" / "zero_to_fp32.py").stat().st_ino == before.st_ino
    done = run(sys.executable, "zero_to_fp32.py", ".", "out", cwd=tmp_path / "saved")
    assert (done.exit_code, done.stderr) == (
        1,
        "error: .: there is no checkpoint here\nhint: name a folder of checkpoints, or one of them\n",
    )
    elsewhere = run(sys.executable, "-S", "-I", "zero_to_fp32.py", ".", "out", cwd=tmp_path / "saved")
    assert elsewhere.exit_code == 1
    assert elsewhere.stderr.startswith("error: zero_to_fp32.py: ")
    assert elsewhere.stderr.endswith(" has no dsrun\nhint: `pip install dsrun`\n")


TRAINS = """
import argparse
import os
import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, InitProcessGroupKwargs
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
data = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2)
engine, optimizer, data = accelerator.prepare(model, DummyOptim(model.parameters()), data)
for x in data:
    accelerator.backward(engine(x).pow(2).mean())
    optimizer.step()
facts = [type(engine).__module__, accelerator.process_index, accelerator.num_processes, args.local_rank]
# In one piece: two ranks write to the same pipe.
os.write(1, (" ".join(map(str, [*facts, engine.global_steps])) + "\\n").encode())
"""
LAUNCH = ("-m", "dsrun.as_deepspeed", "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2")
NO_QUESTIONS = ("--mixed_precision", "no", "--dynamo_backend", "no", "--deepspeed_config_file", "ds.json")


def accelerate_work(work: Path) -> Path:
    pytest.importorskip("accelerate", reason="pip install -e '.[test-clients]'")
    (work / "trains.py").write_text(TRAINS)
    (work / "two").write_text("n0 slots=1\nn1 slots=1\n")
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "optimizer": optimizer}
    (work / "ds.json").write_text(json.dumps(config))
    return work


@pytest.mark.soak("tests/clients/test_accelerate.py::test_accelerates_own_launcher_starts_ranks_on_dsrun")
def test_accelerate_launch_runs_on_one_host_by_torchrun(work: Path) -> None:
    words = (*LAUNCH, "--num_machines", "1", "--main_process_port", "0", *NO_QUESTIONS, "trains.py")
    done = run(sys.executable, *words, cwd=accelerate_work(work))
    assert done.exit_code == 0, done.stderr
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("dsrun.runtime"))
    assert told == [f"dsrun.runtime.engine.engine {rank} 2 None 2" for rank in range(2)], done.stdout


@pytest.mark.timeout(600)
def test_accelerate_launch_runs_on_two_nodes_by_the_deepspeed_command(work: Path) -> None:
    accelerate_work(work)
    environ = clean_environment(XDG_STATE_HOME=str(work / "state"), CUDA_VISIBLE_DEVICES="")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    meeting = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port))
    how = ("--deepspeed_multinode_launcher", "nossh", "--deepspeed_hostfile", "../two")
    nodes: list[subprocess.Popen[str]] = []
    for rank in range(2):
        folder = work / f"node{rank}"
        folder.mkdir()
        for name in ("trains.py", "ds.json"):
            shutil.copy(work / name, folder)
        words = [sys.executable, *LAUNCH, *meeting, "--machine_rank", str(rank), *how, *NO_QUESTIONS, "trains.py"]
        pipe = subprocess.PIPE
        nodes.append(subprocess.Popen(words, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [node.communicate(timeout=250) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    for rank, (out, said) in enumerate(outputs):
        assert f"[{rank}] dsrun.runtime.engine.engine {rank} 2 0 2" in out.splitlines(), (out, said)
        assert f"runs `dsrun run --as-deepspeed --nodes 2 --node-rank {rank} --master-addr 127.0.0.1" in said
    # What it appends to at each launch, and `deepspeed` reads where it reaches the other hosts itself.
    values, ours = read_exported([work / "node0" / ".deepspeed_env"])
    assert values["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert "DSRUN_AS_DEEPSPEED" in ours
