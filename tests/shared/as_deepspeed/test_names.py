"""What `import deepspeed` gives in drop-in mode: the names, the same objects at all paths, and reasons for the rest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsrun.as_deepspeed.search_path import SITE
from dsrun.as_deepspeed.version import STANDARD, full_version
from support.cli import clean_environment
from support.deepspeed_names import FIRST_TIER, Known

#: Import statements and lookups of names that are not there, and what each says.
MISSING = {
    "deepspeed.init_inference": "AttributeError: module 'deepspeed' has no attribute 'init_inference': dsrun trains",
    "from deepspeed import init_inference": "ModuleNotFoundError: deepspeed.init_inference is not there: dsrun trains",
    "import deepspeed.moe.layer": "ModuleNotFoundError: deepspeed.moe is not there: a model's own experts",
    "from deepspeed.moe.layer import MoE": "ModuleNotFoundError: deepspeed.moe is not there: a model's own experts",
    "from deepspeed.inference.v2 import x": "ModuleNotFoundError: deepspeed.inference is not there: dsrun trains",
    "from deepspeed.runtime.zero import TiledLinear": "deepspeed.runtime.zero.TiledLinear is not there: a large Linear",
    "from deepspeed.utils.logging import no_such": "deepspeed.utils.logging.no_such is not there: dsrun has no such",
    "import deepspeed.utils.logging.no_such": "deepspeed.utils.logging.no_such is not there: dsrun has no such",
    "deepspeed.comm.comm.log_summary": "has no attribute 'log_summary': every step is a line of records.jsonl",
    "import deepspeed.zero": "ModuleNotFoundError: No module named 'deepspeed.zero'",
    "deepspeed.get_accelerator().create_op_builder": "create_op_builder is not there: nothing is compiled",
}

_LOOK = """
import importlib, importlib.util, inspect, json, sys
sys.path.insert(0, {site!r})
import deepspeed
assert "torch" not in sys.modules, "the face imports no torch"
known, missing = {known!r}, {missing!r}

def look(package, path):
    found = importlib.import_module(package)
    for name in path.split("."):
        found = getattr(found, name)
    return found

def by_import(path):
    module, _, name = ("deepspeed." + path).rpartition(".")
    space = {{}}
    exec(f"from {{module}} import {{name}} as found", space)
    return space["found"]

names = {{}}
for path, home, parameters in known:
    try:
        found = look("deepspeed", path)
        module, _, name = home.rpartition(".")
        names[path] = {{
            # `deepspeed.zero` is an attribute and no module, as in DeepSpeed itself.
            "imported": path.startswith(("zero.", "checkpointing.")) or by_import(path) is found,
            "same": not home or getattr(importlib.import_module(module), name) is found,
            "unknown": [name for name in parameters if name not in inspect.signature(found).parameters],
        }}
    except Exception as error:
        names[path] = repr(error)
said = {{}}
for statement in missing:
    try:
        exec(statement)
        said[statement] = "nothing"
    except Exception as error:
        said[statement] = f"{{type(error).__name__}}: {{error}}"
constructors = deepspeed.runtime.zero.partition_parameters
before = constructors._orig_torch_arange
constructors._orig_torch_arange = set
patched = constructors._orig_torch_arange is set
constructors._orig_torch_arange = before
print(json.dumps({{
    "names": names,
    "said": said,
    "asked": [
        hasattr(deepspeed, "init_inference"),
        hasattr(deepspeed.utils.logging, "no_such"),
        importlib.util.find_spec("deepspeed.moe") is not None,
        importlib.util.find_spec("deepspeed.utils.logging") is not None,
        hasattr(deepspeed.get_accelerator(), "create_op_builder"),
    ],
    "patched": patched and constructors._orig_torch_arange is before,
    "modules": [
        deepspeed.zero is deepspeed.runtime.zero,
        deepspeed.checkpointing is deepspeed.runtime.activation_checkpointing.checkpointing,
        importlib.import_module("deepspeed.comm.comm") is deepspeed.comm.comm,
    ],
    "version": [deepspeed.__version__, deepspeed.__version_major__, deepspeed.__version_minor__],
    "dist": deepspeed.dist.__name__,
    "star": sorted(name for name in deepspeed.__all__ if name not in dir(deepspeed)),
    "arguments": deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor(len, None) is len,
}}))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What a process that has the face on its path finds; one process for all tests of this file."""
    program = _LOOK.format(site=SITE, known=[tuple(known) for known in FIRST_TIER], missing=list(MISSING))
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("known", FIRST_TIER, ids=lambda known: known.path)
def test_a_name_is_dsruns_object_at_its_path_and_takes_what_programs_pass(seen: dict[str, Any], known: Known) -> None:
    assert seen["names"][known.path] == {"imported": True, "same": True, "unknown": []}


@pytest.mark.parametrize("statement", MISSING)
def test_a_name_that_is_not_there_is_refused_with_its_reason(seen: dict[str, Any], statement: str) -> None:
    assert MISSING[statement] in seen["said"][statement]
    is_explained = "get_accelerator" not in statement and statement != "import deepspeed.zero"
    assert not is_explained or "deepspeed is dsrun here" in seen["said"][statement]


def test_who_only_asks_for_a_name_gets_the_usual_answer(seen: dict[str, Any]) -> None:
    assert seen["asked"] == [False, False, False, True, False]


def test_names_may_be_set_and_set_back_as_transformers_does(seen: dict[str, Any]) -> None:
    assert seen["patched"]
    assert seen["arguments"]


def test_modules_at_two_paths_are_one(seen: dict[str, Any]) -> None:
    assert seen["modules"] == [True, True, True]
    assert seen["star"] == []


def test_the_version_is_that_of_the_metadata(seen: dict[str, Any]) -> None:
    text = Path(SITE, f"deepspeed-{STANDARD}.dist-info", "METADATA").read_text()
    assert f"\nVersion: {full_version(STANDARD)}\n" in text
    major, minor, _ = STANDARD.split(".")
    assert seen["version"] == [full_version(STANDARD), int(major), int(minor)]
    assert seen["dist"] == "dsrun.comm"


def test_a_file_of_the_face_has_no_logic_and_is_short() -> None:
    files = {path: path.read_text() for path in Path(SITE).rglob("*.py")}
    assert {str(path): text.count("\n") for path, text in files.items() if text.count("\n") > 30} == {}
    assert sum(text.count("\n") for text in files.values()) <= 900
    logic = re.compile(r"^\s*(def|class|if(?! __name__ == .__main__.:)|for|while|try|with)\b", re.MULTILINE)
    assert [str(path) for path, text in files.items() if logic.search(text)] == []


def test_the_record_of_the_metadata_names_what_is_there() -> None:
    folder = Path(SITE, f"deepspeed-{STANDARD}.dist-info")
    named = {line.partition(",")[0] for line in (folder / "RECORD").read_text().splitlines()}
    assert named == {"deepspeed/__init__.py", *(str(path.relative_to(SITE)) for path in folder.iterdir())}
    assert [name for name in ("__init__.py",) if Path(SITE, name).exists()] == []


@pytest.mark.depends_on_speed("measures an import")
def test_importing_it_costs_little_more_than_torch_and_starts_nothing() -> None:
    program = (
        "import os, sys, time, torch, resource\n"
        f"sys.path.insert(0, {SITE!r})\n"
        "starts = ('subprocess.Popen', 'os.posix_spawn', 'os.fork')\n"
        "sys.addaudithook(lambda event, _: event in starts and os._exit(3))\n"
        "started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "import deepspeed\n"
        "deepspeed.zero, deepspeed.comm, deepspeed.utils\n"
        "seconds = time.perf_counter() - started\n"
        "print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, torch.cuda.is_initialized())\n"
    )
    found: list[list[str]] = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=True
        )
        found.append(done.stdout.split())
    assert min(float(seconds) for seconds, _, _ in found) < 0.03
    assert min(int(kilobytes) for _, kilobytes, _ in found) < 10 << 10
    assert {has_context for _, _, has_context in found} == {"False"}
