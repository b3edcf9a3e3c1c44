"""What a first word is taken for; how problems with it are told is tested in test_cli.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.plan.launch_plan import Program, StartMethod
from dsrun.launcher.plan.program import check_program, find_program, names_compiler, start_method, start_warnings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(folder: Path, name: str, content: str | bytes, *, mode: int = 0o755) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return name


def command(target: str) -> Program:
    return Program(kind="command", target=target, args=(), python=sys.executable)


@pytest.mark.parametrize(
    "first_line",
    ["#!/bin/sh", "#! /usr/bin/env bash", "#!/usr/bin/env -S LC_ALL=C perl -w", "#!/opt/my tools/x"],
)
def test_a_script_of_another_language_is_a_command(folder: Path, first_line: str) -> None:
    make(folder, "train.sh", f"{first_line}\necho\n")
    assert find_program("./train.sh", kind=None) == ("command", "./train.sh")
    assert find_program(str(folder / "train.sh"), kind=None) == ("command", str(folder / "train.sh"))


def test_a_command_in_the_working_folder_is_not_looked_up_in_path(folder: Path) -> None:
    make(folder, "ls", "#!/bin/sh\n")
    assert find_program("ls", kind=None) == ("command", "./ls")


def test_a_binary_is_a_command(folder: Path) -> None:
    make(folder, "prog", b"\x7fELF\x02\x01\x01\0")
    assert find_program("./prog", kind=None) == ("command", "./prog")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train", "#!/usr/bin/env python3\n"),
        ("train", "#!/venv/bin/python3.11 -u\n"),
        ("train", "#!/usr/bin/env -S A=1 pypy3\n"),
        ("train", "print(1)\n"),
        ("train", "#!\n"),
        ("train", ""),
        ("train.py", "#!/bin/sh\n'''exec' python3 \"$0\" '''\n"),
    ],
)
def test_everything_else_is_a_python_script(folder: Path, name: str, content: str) -> None:
    make(folder, name, content)
    assert find_program(name, kind=None) == ("script", name)


@pytest.mark.parametrize("word", ["sh", "no-such-file", "", "a\0b"])
def test_a_word_that_is_no_file_is_not_looked_up_in_path(word: str) -> None:
    assert find_program(word, kind=None) == ("script", word)


def test_neither_a_folder_nor_a_pipe_is_opened(folder: Path) -> None:
    (folder / "package").mkdir()
    os.mkfifo(folder / "pipe")
    assert find_program("package", kind=None) == ("script", "package")
    assert find_program("pipe", kind=None) == ("script", "pipe")


def test_what_the_user_says_it_is_stands(folder: Path) -> None:
    make(folder, "train.sh", "#!/bin/sh\n")
    assert find_program("train.sh", kind="script") == ("script", "train.sh")


@pytest.mark.parametrize(("asked", "start"), [(None, "fork"), ("fork", "fork"), ("exec", "exec")])
def test_python_is_forked_unless_asked_otherwise(asked: StartMethod | None, start: str) -> None:
    script = Program(kind="script", target="train.py", args=(), python=sys.executable)
    assert start_method(script, asked) == start


SETS = "import os\nos.environ['TORCH_LOGS'] = '+dynamo'\nos.environ['KMP_BLOCKTIME'] = '0'\nimport torch\n"


def script(target: str) -> Program:
    return Program(kind="script", target=target, args=(), python=sys.executable)


def test_a_script_that_sets_what_torch_reads_at_import_is_not_forked_and_says_where(folder: Path) -> None:
    program = script(make(folder, "train.py", SETS))
    assert start_method(program, None) == "exec"
    assert start_warnings(program, None) == (
        "warning: train.py:2: TORCH_LOGS, KMP_BLOCKTIME are set before torch is imported: each rank imports torch "
        "itself (`--start exec`), and starts later than with `--env TORCH_LOGS=VALUE`",
    )


@pytest.mark.parametrize("asked", ["fork", "exec"])
def test_how_a_script_is_to_start_stands_whatever_it_sets(folder: Path, asked: StartMethod) -> None:
    program = script(make(folder, "train.py", SETS))
    assert start_method(program, asked) == asked
    assert start_warnings(program, asked) == ()


@pytest.mark.parametrize(
    "content",
    [
        "import os\nos.environ['NCCL_DEBUG'] = os.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n",
        "import os, torch\nos.environ['TORCH_LOGS'] = '+dynamo'\n",
        "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\nimport torch\n",
    ],
)
def test_a_script_that_sets_what_still_counts_is_forked(folder: Path, content: str) -> None:
    program = script(make(folder, "train.py", content))
    assert start_method(program, None) == "fork"
    assert start_warnings(program, None) == ()


def test_a_script_that_is_no_file_is_left_to_its_check(folder: Path) -> None:
    (folder / "package").mkdir()
    os.mkfifo(folder / "pipe")
    for target in ("package", "pipe", "gone.py", "", "a\0b"):
        assert start_method(script(target), None) == "fork"
        assert start_warnings(script(target), None) == ()


def test_other_programs_are_never_forked(folder: Path) -> None:
    make(folder, "train.sh", "#!/usr/bin/env bash\n")
    assert start_method(command("./train.sh"), None) == "exec"
    with pytest.raises(UsageError) as caught:
        start_method(command("./train.sh"), "fork")
    assert caught.value.render() == (
        "error: `--start fork` cannot fork ./train.sh: it is a bash script, not Python\nhint: leave `--start fork` out"
    )
    with pytest.raises(UsageError, match="cannot fork nvidia-smi: it is run as it is, not by Python"):
        start_method(command("nvidia-smi"), "fork")


def test_a_command_without_its_bit_is_told_with_what_it_is(folder: Path) -> None:
    make(folder, "train.sh", "#!/bin/bash\n", mode=0o644)
    kind, target = find_program("train.sh", kind=None)
    with pytest.raises(UsageError) as caught:
        check_program(Program(kind=kind, target=target, args=(), python=sys.executable), verbs=[])
    assert caught.value.render() == (
        "error: command ./train.sh: is a bash script and not executable\nhint: `chmod +x ./train.sh`"
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import torch, dsrun\ndsrun.initialize(model=model, config='ds.json')\n", False),
        ("model.compiled = False  # recompiled, compilers\n", False),
        ("model = torch.compile(model)\n", True),
        ("model.compile()\n", True),
        ("from torch._dynamo import config\n", True),
        ("import torch._inductor.config\n", True),
        ("from transformers import AutoModel\n", True),
        ("from torch.nn.parallel import DistributedDataParallel as Wrapped\n", True),
        ("from torch.distributed.fsdp import FSDPModule\n", True),
        ("optimizer = torch.optim.AdamW(model.parameters())\n", True),
        ("from dsrun.ops.adam import FusedAdam\n", True),
        ("from dsrun.ops.adam import DeepSpeedCPUAdam\n", True),
        ("from dsrun.long_sequence import TiledMLP\n", True),
        ("from torch.distributed.pipelining import ScheduleGPipe\n", True),
        ("import torchvision\n", True),
        ("", False),
    ],
)
def test_a_script_names_what_imports_the_compiler(folder: Path, text: str, named: bool) -> None:
    below = folder / "below"
    below.mkdir()
    make(below, "train.py", text)
    program = Program(kind="script", target="train.py", args=(), python=sys.executable)
    assert names_compiler(program, folder=str(below)) is named


def test_what_is_no_script_is_not_read_for_the_compiler(folder: Path) -> None:
    assert not names_compiler(command("./train.py"), folder=str(folder))
    assert names_compiler(Program(kind="module", target="train", args=(), python=sys.executable), folder=str(folder))
    assert not names_compiler(Program(kind="script", target="gone.py", args=(), python="python"), folder=str(folder))
