from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from dsrun.launcher.scheduler.jobset import JobSetSettings, job_set, pod_of
from support.cli import invoke
from support.manifests import manifest_errors

PAGE = Path(__file__).parents[3] / "docs/internals/kubernetes.md"
LAST = ["--", "--nodes", "2", "--gpus", "8", "--image", "img:1"]
#: Cores and memory, without which there is a warning.
RESERVED = ["--cpus", "96", "--memory", "900Gi"]


def test_a_manifest_is_printed_as_yaml_and_as_json() -> None:
    words = ["-n", "8", "--grace", "30s", "src/train.py", "--lr", "1e-3", "--note", "yes", "on: #1"]
    last = [*LAST, *RESERVED, "--namespace", "lab", "--max-restarts", "3"]
    result = invoke("k8s", *words, *last)
    settings = JobSetSettings(
        name="train",
        image="img:1",
        nodes=2,
        gpus=8,
        namespace="lab",
        max_restarts=3,
        grace_s=30,
        cpus="96",
        memory="900Gi",
    )
    assert (result.exit_code, result.stderr) == (0, "")
    manifest = yaml.safe_load(result.stdout)
    assert manifest == job_set(["--backend", "nccl", *words], settings)
    assert manifest_errors(manifest) == []
    assert "&id" not in result.stdout, "nothing is written as a reference"
    as_json = invoke("k8s", *words, *last, "--json")
    assert json.loads(as_json.stdout) == manifest


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "the pods are BestEffort to Kubernetes, which evicts them first"),
        (["--cpus", "96"], "the pods are Burstable to Kubernetes, which evicts them before those that name both"),
        (RESERVED, ""),
    ],
)
def test_who_reserves_nothing_is_told_what_that_means(more: list[str], said: str) -> None:
    result = invoke("k8s", "train.py", *LAST, *more)
    assert result.exit_code == 0
    assert manifest_errors(yaml.safe_load(result.stdout)) == []
    assert said in result.stderr
    assert result.stderr.count("\n") == bool(said)


def test_a_pod_is_told_of_its_gpus() -> None:
    (container,) = pod_of(yaml.safe_load(invoke("k8s", "train.py", *LAST).stdout))["containers"]
    assert container["command"][-5:] == ["--ranks-per-host", "8", "--backend", "nccl", "train.py"]


def test_a_pod_that_trains_without_its_gpus_is_told_so_alone() -> None:
    (container,) = pod_of(yaml.safe_load(invoke("k8s", "--no-gpu", "train.py", *LAST).stdout))["containers"]
    assert "--no-gpu" in container["command"]
    assert "nccl" not in container["command"]


def test_a_file_changes_the_pods(tmp_path: Path) -> None:
    patch = tmp_path / "pod.yaml"
    patch.write_text("spec:\n  nodeSelector: {gpu: h100}\n  containers:\n  - {name: dsrun, workingDir: /work}\n")
    result = invoke("k8s", "train.py", *LAST, *RESERVED, "--pod-patch", str(patch))
    pod = pod_of(yaml.safe_load(result.stdout))
    assert (result.stderr, pod["nodeSelector"]) == ("", {"gpu": "h100"})
    assert pod["containers"][0]["workingDir"] == "/work"


def test_the_pages_file_gives_what_a_cluster_takes(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(# pod.yaml\n.*?)```", PAGE.read_text(), re.S)
    patch = tmp_path / "pod.yaml"
    patch.write_text(text)
    result = invoke("k8s", "train.py", *LAST, *RESERVED, "--name", "run7", "--pod-patch", str(patch))
    manifest = yaml.safe_load(result.stdout)
    assert (result.exit_code, result.stderr, manifest_errors(manifest)) == (0, "", [])
    assert {"nodeSelector", "tolerations", "affinity"} <= pod_of(manifest).keys()


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    patch = tmp_path / "pod.yaml"
    patch.write_text("# nothing yet\n")
    words = ["k8s", "train.py", *LAST, *RESERVED]
    assert invoke(*words, "--pod-patch", str(patch)) == invoke(*words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spec: [\n", "pod.yaml:2: is no YAML: "),
        ("nodeSelector: {gpu: h100}\n", "pod.yaml: `nodeSelector` is no field of a pod's template"),
        ("- a\n", "pod.yaml: expected the fields of a pod's template, got a list"),
    ],
)
def test_a_file_that_cannot_be_merged_is_named(tmp_path: Path, text: str, said: str) -> None:
    patch = tmp_path / "pod.yaml"
    patch.write_text(text)
    result = invoke("k8s", "train.py", *LAST, *RESERVED, "--pod-patch", str(patch))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_the_script_may_be_a_file_of_the_image_alone() -> None:
    assert invoke("k8s", "/opt/not/here.py", *LAST).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (LAST, "no script is named"),
        (["train.py"], "`--image` is missing"),
        (["train.py", *LAST, "--name", "My Job"], "`--name` is 'My Job', which Kubernetes does not take"),
        (["train.py", *LAST, "--memory", "900"], "`--memory` is '900'; expected a size"),
        (["train.py", *LAST, "--pod-patch", "missing.yaml"], "missing.yaml: no such file or directory"),
        (["train.py", *LAST, "--colour"], "`dsrun k8s` has no option `--colour`"),
        (["train.py", *LAST, "--nodes", "0"], "`--nodes` is 0; expected 1 to 100000"),
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
