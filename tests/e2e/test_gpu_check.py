"""The check for machines with a GPU runs here too, on the CPU and tiny: its first run there is not the first of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import packaging
import pytest
import torch
from gpu.driver import chosen
from gpu.parts import main_parts, proof_parts
from gpu.proofs import folder_of
from gpu.proofs_plugin import probable_s

_SCRIPTS = Path(__file__).parents[2] / "scripts"
_TINY = ("--device", "cpu", "--size", "tiny")

pytestmark = pytest.mark.timeout(240)


def run_check(*words: str, python: str = sys.executable) -> tuple[int, str, str]:
    run = subprocess.run(
        ["bash", str(_SCRIPTS / "gpu_check"), *words],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHON": python, "OMP_NUM_THREADS": "1"},
    )
    return run.returncode, run.stderr, run.stdout


def report_of(out: Path, *only: str) -> tuple[dict[str, Any], str]:
    """Returns the results of tiny parts, which all went well, and what was said."""
    code, talk, _ = run_check(*_TINY, "--out", str(out), "--only", ",".join(only))
    assert code == 0, talk
    return json.loads(out.read_text()), talk


#: Of each group of parity, one of its rows.
_PARITY = {
    "stages": "bf16, clipping 0.5: stages",
    "tiers": "optimizer in host memory",
    "formats": "compiled blocks: stages",
}


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(("stages",), id="stages"),
        pytest.param(
            ("tiers", "formats"), id="tiers and formats", marks=pytest.mark.soak("the group of stages; rows run alike")
        ),
    ],
)
def test_proofs_and_parity_run_by_rows(tmp_path: Path, groups: tuple[str, ...]) -> None:
    names = [f"parity {group}" for group in groups]
    report, talk = report_of(tmp_path / "results.json", "probe", "proofs", *names)
    parts = report["parts"]
    assert [part["state"] for part in parts.values()] == ["ok"] * len(parts), talk
    found, proofs = parts["proofs found"]["result"], parts["proofs runtime"]["result"]
    assert found["folders"] == {"runtime/memory": len(proofs["tests"])}
    assert proofs["passed"] == len(proofs["tests"]) > 5
    for group in groups:
        parity = parts[f"parity {group}"]["result"]["rows"]
        assert {row["state"] for row in parity.values()} == {"ok"}
        assert _PARITY[group] in parity
    assert talk.splitlines()[-1] == f"{len(parts)} passed, 0 failed, 0 skipped"


@pytest.mark.parametrize(
    ("peers", "more"),
    [
        pytest.param(("dsrun-3",), (), id="dsrun"),
        pytest.param(
            ("dsrun-3", "fsdp2", "deepspeed-1"),
            ("overhead",),
            id="peers too",
            marks=pytest.mark.soak("plain torch and dsrun, which are compared as peers are"),
        ),
    ],
)
def test_figures_stand_beside_their_floors_and_contenders_train_the_same(
    tmp_path: Path, peers: tuple[str, ...], more: tuple[str, ...]
) -> None:
    contenders = [f"llama {name}" for name in ("plain", *peers, "losses")]
    offload = ("floors", "offload tiny compute", "offload tiny dsrun")
    report, talk = report_of(tmp_path / "results.json", *more, *contenders, *offload)
    parts = report["parts"]
    assert parts["llama losses"]["state"] == "ok", talk
    losses = parts["llama losses"]["result"]
    assert losses["against"] == "plain"
    # To the bit on a CPU, where all of them run the same kernels.
    compared = [peer for peer in peers if peer in losses["largest difference"]]
    assert {losses["largest difference"][peer] for peer in compared} == {0}
    assert set(peers) - set(compared) <= {"deepspeed-1"}, "which is not here on every machine"
    rows = [one for name, part in parts.items() if "round 0" in name for one in part.get("result", {}).get("rows", [])]
    assert len(rows) >= 2 * (1 + len(compared))
    assert all(one["tokens"] == 128 and min(one["seconds"]) > 0 for one in rows)
    (short, long) = report["offload"]
    assert (short["contender"], short["tokens"], long["tokens"]) == ("dsrun-cpu", 256, 512)
    assert all(row["of_floor"] == pytest.approx(row["floor_s"] / row["seconds"]) for row in (short, long))
    assert parts["offload tiny dsrun-cpu"]["result"]["host_optimizer"] == "dsrun's own"


_TIME = "three minutes for proofs, eight for all: what takes longer belongs behind --only"


def test_the_proofs_of_this_tree_take_three_minutes_and_what_runs_by_default_eight(
    request: pytest.FixtureRequest,
) -> None:
    # The tests of this run: all of the tree's where all of them run.
    folders: dict[str, dict[str, float]] = {}
    for item in request.session.items:
        if item.get_closest_marker("cuda") is not None:
            folders.setdefault(folder_of(item.nodeid), {})[item.nodeid] = probable_s(item)
    proofs = proof_parts({"state": "ok", "result": {"folders": folders}}, device="cuda") if folders else []
    machine = {"memory_bytes": 128 << 30, "gpu_bytes": 79 << 30, "disk_bytes": 60 << 30}
    parts = chosen(main_parts(proofs, device="cuda", size="1.3B", facts=machine), ())
    # In whole seconds of each part, as they are listed.
    assert sum(round(part.estimate_s) for part in chosen(parts, ("proofs",))) <= 180, _TIME
    assert sum(round(part.estimate_s) for part in parts) <= 480, _TIME


@pytest.mark.soak("the one above, which adds up the tests of its own run")
def test_the_whole_tree_is_listed_with_what_its_parts_take() -> None:
    code, _, listed = run_check("--list")
    assert code == 0
    seconds = {name: int(took) for took, name in (line.strip().split(" s  ") for line in listed.splitlines())}
    assert 0 < sum(took for name, took in seconds.items() if name.startswith("proofs ")) <= 180, _TIME
    assert sum(seconds.values()) <= 480, _TIME


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    code, talk, _ = run_check("--out", str(tmp_path / "results.json"))
    assert code == 2
    assert talk.startswith("error: there is no CUDA GPU here")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_part_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    code, talk, _ = run_check(*_TINY, "--out", str(tmp_path / "results.json"), "--only", "lama")
    assert code == 2
    assert talk.startswith("error: --only lama: no part's name begins so\nhint: they begin with probe, ")


def test_an_interpreter_without_packages_is_told_which_and_how_to_get_them(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    bare = tmp_path / "bare" / "bin" / "python"
    # As pip would bring it.
    (packages,) = (tmp_path / "bare").glob("lib/*/site-packages")
    (packages / "packaging").symlink_to(Path(packaging.__file__).parent)
    out = tmp_path / "results.json"
    code, talk, _ = run_check(*_TINY, "--out", str(out), "--only", "proofs,overhead", python=str(bare))
    assert code == 1
    parts = json.loads(out.read_text())["parts"]
    assert parts["probe"]["state"] == "failed"
    assert "packages are missing: torch>=2.10, click>=8.1" in parts["probe"]["why"]
    assert "bash scripts/gpu_check --bundle DIR" in talk
    assert parts["overhead"] == {"state": "not run", "why": "nothing can run here: see probe"}
    # A list without proofs is not taken for all that there is.
    code, talk, listed = run_check("--list", python=str(bare))
    assert (code, "proofs" in listed) == (0, False)
    assert "note: without the proofs, which cannot be looked for: packages are missing: torch>=2.10" in talk
