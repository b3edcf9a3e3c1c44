"""Wheels for a machine without network: downloaded, weighed, and used where they are missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import bundle
from gpu.packages import dependencies, tools_of_tests, wheels_in

from support.wheels import make_wheel

#: Enough of every dependency for any bound.
VERSION = "999.0"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for all there is: a wheel of each dependency but one, and none of DeepSpeed."""
    folder = tmp_path / "index"
    for requirement in (*dependencies(), *tools_of_tests()):
        name = requirement.partition(">")[0]
        if name not in ("torch", "xxhash"):
            make_wheel(folder, name, VERSION, *(["torch>=2"] if name == "safetensors" else []))
    # torch is there, and must not be taken: it is what makes the other machine a GPU machine.
    make_wheel(folder, "torch", VERSION)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return folder


def test_a_bundle_says_its_size_and_what_is_not_in_it(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("xxhash", "pluggy"):
        make_wheel(index, name, VERSION)
    safetensors = next(index.glob("safetensors-*"))
    safetensors.unlink()
    make_wheel(index, "safetensors", VERSION, "pluggy")
    assert bundle.download(tmp_path / "bundle") == 0
    talk = capfd.readouterr().err
    assert "note: without DeepSpeed, of which no wheel could be made here" in talk
    assert "note: parts that measure DeepSpeed will not run" in talk
    assert "15 wheels, 0.0 MiB of 64, for Python 3.12" in talk
    assert {"xxhash", "pluggy", "pytest"} <= set(wheels_in(tmp_path / "bundle"))
    assert "torch" not in wheels_in(tmp_path / "bundle")


def test_a_dependency_that_cannot_be_downloaded_fails_the_bundle(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bundle.download(tmp_path / "bundle") == 1
    assert "error: pip could not download what dsrun needs" in capfd.readouterr().err
    assert index.exists()


def test_a_bundle_that_is_too_heavy_to_travel_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_wheel(tmp_path, "heavy", "1.0", padding=3000)
    assert bundle.judged(tmp_path, ["heavy"], python="3.12", limit_bytes=2000) == 1
    assert "too heavy to travel" in capfd.readouterr().err
    assert bundle.judged(tmp_path, ["heavy"], python="3.12", limit_bytes=20_000) == 0


def test_a_wheel_whose_need_is_not_in_the_folder_is_found_before_it_travels(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_wheel(tmp_path, "fabric", "4.0", "paramiko>=2", 'winning; sys_platform == "win32"')
    assert bundle.judged(tmp_path, ["fabric>=3"], python="3.12") == 1
    assert "error: no wheel for paramiko>=2\n" in capfd.readouterr().err


def test_a_run_finds_what_the_machine_lacks_and_keeps_what_it_has(tmp_path: Path) -> None:
    folder, site = tmp_path / "bundle", tmp_path / "site"
    make_wheel(folder, "deepspeed", "0.19.8", "hjson", "psutil")
    make_wheel(folder, "hjson", "3.1")
    make_wheel(folder, "psutil", "1.0")
    code = (
        "import json, os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from gpu import bundle\n"
        f"bundle.use(Path({str(folder)!r}), Path({str(site)!r}))\n"
        "words = 'import deepspeed_of_a_wheel, psutil; print(psutil.__file__)'\n"
        "print(json.dumps(subprocess.run([sys.executable, '-c', words], capture_output=True, text=True).stdout))\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "bundle: deepspeed 0.19.8, hjson 3.1\n"
    assert str(site) not in json.loads(run.stdout), "its own psutil is newer than the bundle's"
    assert json.loads(run.stdout).strip().endswith("__init__.py")


def test_a_folder_without_wheels_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no wheels in .*bundle\nhint: without --out, --bundle .*bundle fills it"):
        bundle.use(tmp_path / "bundle", tmp_path / "site")


def test_wheels_of_another_python_are_told_with_the_way_to_those_of_this_one(tmp_path: Path) -> None:
    make_wheel(tmp_path, "deepspeed", "0.19.8")
    (tmp_path / "deepspeed-0.19.8-py3-none-any.whl").rename(tmp_path / "deepspeed-0.19.8-cp27-none-any.whl")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(SystemExit, match=rf"not a supported wheel.*\nhint: .* --bundle-python {re.escape(here)}$"):
        bundle.use(tmp_path, tmp_path / "site")
