from __future__ import annotations

import json

import pytest
import yaml

from dsrun.launcher.scheduler.jobset import JobSetSettings, job_set
from support.cli import invoke

LAST = ["--", "--nodes", "2", "--gpus", "8", "--image", "img:1"]


def test_a_manifest_is_printed_as_yaml_and_as_json() -> None:
    words = ["-n", "8", "--grace", "30s", "src/train.py", "--lr", "1e-3", "--note", "yes", "on: #1"]
    result = invoke("k8s", *words, *LAST, "--namespace", "lab", "--max-restarts", "3")
    settings = JobSetSettings(
        name="train", image="img:1", nodes=2, gpus=8, namespace="lab", max_restarts=3, grace_s=30
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert yaml.safe_load(result.stdout) == job_set(words, settings)
    as_json = invoke("k8s", *words, *LAST, "--namespace", "lab", "--max-restarts", "3", "--json")
    assert json.loads(as_json.stdout) == yaml.safe_load(result.stdout)


def test_the_script_may_be_a_file_of_the_image_alone() -> None:
    assert invoke("k8s", "/opt/not/here.py", *LAST).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (LAST, "no script is named"),
        (["train.py"], "`--image` is missing"),
        (["train.py", *LAST, "--name", "My Job"], "`--name` is 'My Job', which Kubernetes does not take"),
        (["train.py", *LAST, "--colour"], "`dsrun k8s` has no option `--colour`"),
        (["train.py", *LAST, "--nodes", "0"], "`--nodes` is 0; expected 1 or more"),
        (["--nonsense", "train.py", *LAST], "`dsrun run` has no option `--nonsense`"),
        (["-d", "train.py", *LAST], "`--detach` makes no sense with `dsrun k8s`"),
        (["-H", "hosts", "train.py", *LAST], "`--hostfile` makes no sense with `dsrun k8s`: the pods are the hosts"),
        (["--nodes", "2", "train.py", *LAST], "`--nodes` makes no sense with `dsrun k8s`: the pods are the hosts"),
        (["--max-restarts", "2", "train.py", *LAST], "the JobSet starts pods again: `-- --max-restarts N`"),
        (["--dry-run", "train.py", *LAST], "it prints a manifest, and starts nothing"),
    ],
)
def test_what_could_not_work_is_refused(words: list[str], message: str) -> None:
    result = invoke("k8s", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
