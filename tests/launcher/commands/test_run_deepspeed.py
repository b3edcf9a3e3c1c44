"""The cases of DeepSpeed's own tests of its launcher (tests/unit/launcher), held against what dsrun would start.

Through the command line, from the words to the plan: DeepSpeed's call an inner function, and stayed green when what
stands before it lost a host. What its runners make of a command has no counterpart here: no shell reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke

ONE = "worker-0 slots=4\n"
TWO = "worker-0 slots=4\nworker-1 slots=4\n"
ALL = [0, 1, 2, 3]


@pytest.fixture(autouse=True)
def in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def plan_of(hosts: str, *options: str, args: tuple[str, ...] = ()) -> dict[str, Any]:
    Path("hosts").write_text(hosts)
    result = invoke("--hostfile", "hosts", *options, "--dry-run", "--json", "train.py", *args)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def slots_of(hosts: str, *options: str) -> dict[str, list[int]]:
    """The slots that ranks would take, by host."""
    nodes = plan_of(hosts, *options)["nodes"]
    return {
        node["host"]["name"]: node["host"]["gpus"] or [worker["local_rank"] for worker in node["workers"]]
        for node in nodes
    }


def refusal(hosts: str, *options: str) -> str:
    Path("hosts").write_text(hosts)
    result = invoke("--hostfile", "hosts", *options, "--dry-run", "train.py")
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


@pytest.mark.parametrize(
    ("hosts", "options", "slots"),
    [
        (ONE, [], {"worker-0": ALL}),
        (ONE, ["--exclude", "worker-0:1"], {"worker-0": [0, 2, 3]}),
        (ONE, ["--exclude", "worker-0:1,2"], {"worker-0": [0, 3]}),
        (ONE, ["--include", "worker-0:1"], {"worker-0": [1]}),
        (ONE, ["--include", "worker-0:1,1"], {"worker-0": [1]}),
        (ONE, ["--include", "worker-0:1@worker-0:0,1"], {"worker-0": [0, 1]}),
        (ONE, ["--include", "worker-0"], {"worker-0": ALL}),
        (TWO, [], {"worker-0": ALL, "worker-1": ALL}),
        (TWO, ["--include", "worker-1:0,3"], {"worker-1": [0, 3]}),
        (TWO, ["--exclude", "worker-1"], {"worker-0": ALL}),
        (TWO, ["--exclude", "worker-0:0,1@worker-1:3"], {"worker-0": [2, 3], "worker-1": [0, 1, 2]}),
        (TWO, ["--include", "worker-0@worker-1:0,2"], {"worker-0": ALL, "worker-1": [0, 2]}),
        (TWO, ["--num_nodes", "1", "--num_gpus", "2"], {"worker-0": [0, 1]}),
    ],
)
def test_filters_take_the_slots_that_they_name(hosts: str, options: list[str], slots: dict[str, list[int]]) -> None:
    assert slots_of(hosts, *options) == slots


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exclude", "worker-0@worker-1"], "leaves no slot"),
        (["--exclude", "worker-0:0,1,2,3@worker-1"], "leaves no slot"),
        (["--include", "jeff"], "no host is called `jeff`"),
        (["--exclude", "jeff"], "no host is called `jeff`"),
        (["--include", "worker-1:4"], "host `worker-1` has no slot 4"),
        (["--exclude", "worker-1:4"], "host `worker-1` has no slot 4"),
        (["--exclude", "worker-1@worker-0:1@5"], "no host is called `5`"),
        (["--include", "worker-0", "--exclude", "worker-0"], "`--include` and `--exclude` cannot be used together"),
        *(
            ([*numbers, option, "worker-0"], f"and `--{'include' if option == '-i' else 'exclude'}` cannot be used")
            for numbers in (["--num_nodes", "1"], ["--num_gpus", "1"], ["--num_nodes", "1", "--num_gpus", "1"])
            for option in ("-i", "-e")
        ),
    ],
)
def test_filters_that_cannot_be_meant_are_refused(options: list[str], message: str) -> None:
    assert message in refusal(TWO, *options)


def test_a_hostfile_with_blank_lines_and_comments_names_its_hosts() -> None:
    hosts = (
        "worker-1 slots=2\n\n    worker-2 slots=2\n    # this is a comment\n  #worker-9 slots=3\n"
        "localhost slots=1\n123.23.12.10 slots=2\n"
    )
    assert slots_of(hosts) == {"worker-1": [0, 1], "worker-2": [0, 1], "localhost": [0], "123.23.12.10": [0, 1]}


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ("worker-1 slots=2\nworker-2 slots=1\nworker-1 slots=1\n", ["hosts:3:1: "]),
        ("this is bad slots=1\n", ["hosts:1:6: "]),
        ("missingslots\n", ["hosts:1:13: "]),
        ("", ["hosts: "]),
        ("worker-1 slots=2\nthis is bad slots=1\nworker-2 slots=4\nmissingslots\n", ["hosts:2:6: ", "hosts:4:13: "]),
    ],
)
def test_a_bad_hostfile_is_refused_with_every_place(hosts: str, places: list[str]) -> None:
    errors = [line for line in refusal(hosts).splitlines() if line.startswith("error: ")]
    for place in places:
        assert any(error.startswith(f"error: {place}") for error in errors), errors


@pytest.mark.parametrize(
    "prompt",
    [
        "'I am 6' tall'",
        'I am 72" tall',
        "'\"translate English to Romanian: \"'",
        'I\'m going to tell them "DeepSpeed is the best"',
    ],
)
@pytest.mark.parametrize("hosts", [ONE, TWO])
def test_quotes_in_the_scripts_words_stay_as_they_are(hosts: str, prompt: str) -> None:
    assert plan_of(hosts, args=("--prompt", prompt))["program"]["args"] == ["--prompt", prompt]


@pytest.mark.parametrize("value", ["64(x2)", "/usr/local/cuda/lib64", "a b", 'say "x"'])
def test_variables_with_special_characters_stay_as_they_are(value: str) -> None:
    assert plan_of(TWO, "--env", f"TASKS={value}")["env"]["TASKS"] == value
