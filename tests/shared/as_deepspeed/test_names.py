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
from dsrun.deepspeed_missing import BY_NAME
from support.cli import clean_environment
from support.core_speed import least_seconds
from support.deepspeed_names import ABSENT, ATTRIBUTES, KNOWN, SURFACE

#: Import statements and lookups of names that are not there, and what each says.
MISSING = {
    "deepspeed.init_inference": "AttributeError: module 'deepspeed' has no attribute 'init_inference': dsrun trains",
    "from deepspeed import init_inference": "ModuleNotFoundError: deepspeed.init_inference is not there: dsrun trains",
    "import deepspeed.moe.layer": "ModuleNotFoundError: deepspeed.moe.layer is not there: a model's own experts",
    "from deepspeed.moe.layer import MoE": "deepspeed.moe.layer is not there: a model's own experts",
    "from deepspeed.inference.v2 import x": "ModuleNotFoundError: deepspeed.inference is not there: dsrun trains",
    "from deepspeed.runtime.zero import TiledLinear": "deepspeed.runtime.zero.TiledLinear is not there: a large Linear",
    "from deepspeed.runtime.zero.stage3 import x": "deepspeed.runtime.zero.stage3.x is not there: dsrun's ZeRO",
    "from deepspeed.utils import no_such": "deepspeed.utils.no_such is not there: dsrun has no such",
    "import deepspeed.utils.no_such": "deepspeed.utils.no_such is not there: dsrun has no such",
    "deepspeed.no_such": "module 'deepspeed' has no attribute 'no_such': dsrun has no such name",
    "import deepspeed.zero": "deepspeed.zero is an attribute and no module: write `from deepspeed import zero`",
    "deepspeed.get_accelerator().create_op_builder": "create_op_builder is not there: nothing is compiled",
    "from deepspeed.pipe import DualPipeVModule": "deepspeed.pipe.DualPipeVModule is not there: `pipeline.schedule`",
    "from deepspeed.runtime.pipe import p2p": "deepspeed.runtime.pipe.p2p is not there: engine.train_batch runs",
    # Names that DeepSpeed had before 0.19.8, and that scripts still import.
    "from deepspeed.ops.sparse_attention import SparseSelfAttention": "attention is the model's own",
    "from deepspeed.compression.compress import init_compression": "dsrun trains weights as they are",
    "from deepspeed.runtime.fp16.onebit.adam import OnebitAdam": "DeepSpeed 0.19.8 has no 1-bit optimizers either",
    "from deepspeed.runtime.config import ONEBIT_LAMB_OPTIMIZER": "DeepSpeed 0.19.8 has no 1-bit optimizers either",
    "deepspeed.zero.MiCS_Init": "shards are cut over all ranks: use zero.Init",
    "from deepspeed.runtime.zero.mics_utils import x": "shards are cut over all ranks: use zero.Init",
    "from deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop": "DeepSpeed 0.19.8 has dropped it too",
    "from deepspeed.runtime.eigenvalue import Eigenvalue": "DeepSpeed 0.19.8 has dropped it too",
    "from deepspeed.moe.utils import configure_moe_param_groups": "a model's own experts are trained as they are",
    "from deepspeed.ops import __compatible_ops__": "nothing is compiled",
    "from deepspeed.ops.op_builder import CPUAdamBuilder": "nothing is compiled; dsrun.ops has the optimizers",
}

_LOOK = """
import importlib, importlib.util, inspect, json, sys
sys.path.insert(0, {site!r})
import deepspeed
assert "torch" not in sys.modules, "the face imports no torch"
known, missing, absent, attributes = {known!r}, {missing!r}, {absent!r}, {attributes!r}

def look(package, path):
    found, parts = importlib.import_module(package), path.split(".")
    for at, name in enumerate(parts):
        found = getattr(found, name)
        if at + 1 < len(parts) and callable(found):  # a function hides the module of its name, as in DeepSpeed
            found = importlib.import_module(".".join([package, *parts[:at + 1]]))
    return found

def by_import(path):
    module, _, name = ("deepspeed." + path).rpartition(".")
    space = {{}}
    exec(f"from {{module}} import {{name}} as found", space)
    return space["found"]

def parameters_of(found):
    try:
        return list(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # of no function of Python's
        return None

def words(statement):
    try:
        exec(statement)
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
    return "nothing"

names = {{}}
for path, home, parameters, _ in known:
    try:
        found = look("deepspeed", path)
        module, _, name = home.rpartition(".")
        taken = parameters_of(found)
        names[path] = {{
            "imported": path.split(".")[0] in attributes or by_import(path) is found,
            "same": getattr(importlib.import_module(module), name) is found,
            "taken": list(parameters) if taken is None else [name for name in taken if name in parameters],
        }}
    except Exception as error:
        names[path] = repr(error)

refused = {{}}
for module, entries in {surface!r}:
    path = "deepspeed." + module if module else "deepspeed"
    said = words("import " + path)
    if said != "nothing":
        refused[module] = [said, words("look('deepspeed', " + repr(module) + ")")]
        continue
    for name in entries:
        if not hasattr(importlib.import_module(path), name):
            by_attribute = f"getattr(importlib.import_module({{path!r}}), {{name!r}})"
            refused[module + "." + name] = [words(f"from {{path}} import {{name}}"), words(by_attribute)]

constructors = deepspeed.runtime.zero.partition_parameters
before = constructors._orig_torch_arange
constructors._orig_torch_arange = set
patched = constructors._orig_torch_arange is set
constructors._orig_torch_arange = before
print(json.dumps({{
    "names": names,
    "said": {{statement: words(statement) for statement in missing}},
    "absent": {{path: words("look('deepspeed', " + repr(path) + ")") for path in absent}},
    "refused": refused,
    "listed": {{
        name: list(module.__all__) for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"
    }},
    "asked": [
        hasattr(deepspeed, "init_inference"),
        hasattr(deepspeed.utils.logging, "no_such"),
        importlib.util.find_spec("deepspeed.inference") is not None,
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
    modules = [(about, sorted(names)) for about, names in SURFACE.items() if not about.startswith("class ")]
    program = _LOOK.format(
        site=SITE,
        known=[tuple(known) for known in KNOWN],
        missing=list(MISSING),
        absent=list(ABSENT),
        attributes=ATTRIBUTES,
        surface=modules,
    )
    done = subprocess.run(
        [sys.executable, "-"], input=program, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("tier", [1, 2, 3, 4])
def test_names_are_dsruns_objects_at_all_paths_and_take_what_programs_pass(seen: dict[str, Any], tier: int) -> None:
    found = {known.path: seen["names"][known.path] for known in KNOWN if known.tier == tier}
    expected = {
        known.path: {"imported": True, "same": True, "taken": list(known.parameters)}
        for known in KNOWN
        if known.tier == tier
    }
    assert {path: what for path, what in found.items() if what != expected[path]} == {}


def test_all_of_the_first_tier_and_nearly_all_of_the_second_are_there(seen: dict[str, Any]) -> None:
    there = {tier: {known.path for known in KNOWN if known.tier == tier} for tier in (1, 2)}
    absent = {tier: {path for path, of_tier in ABSENT.items() if of_tier == tier} for tier in (1, 2)}
    assert absent[1] == set()
    share = len(there[2]) / (len(there[2]) + len(absent[2]))
    assert share >= 0.95, f"{share:.1%} of the second tier; not there: {sorted(absent[2])}"


def test_names_of_the_tiers_that_are_not_there_say_why(seen: dict[str, Any]) -> None:
    assert sorted(seen["absent"]) == sorted(ABSENT)
    for path, said in seen["absent"].items():
        assert said.startswith("AttributeError: module 'deepspeed"), path
        assert "dsrun has no such name" not in said, path


def test_every_other_name_of_deepspeeds_is_refused_with_a_reason_of_its_own(seen: dict[str, Any]) -> None:
    assert {
        name: said
        for name, said in seen["refused"].items()
        if any("deepspeed is dsrun here" not in text or "dsrun has no such name" in text for text in said)
    } == {}
    assert len(seen["refused"]) > 600


def test_what_the_face_lists_is_in_the_table(seen: dict[str, Any]) -> None:
    table = {"deepspeed." + known.path for known in KNOWN}
    modules = set(seen["listed"])
    listed = {f"{module}.{name}" for module, names in seen["listed"].items() for name in names}
    assert sorted(listed - table - modules) == []


def test_reasons_are_for_names_that_are_not_there(seen: dict[str, Any]) -> None:
    modules = {module.removeprefix("deepspeed").removeprefix(".") for module in seen["listed"]}
    there = {known.path for known in KNOWN} | modules
    assert sorted(name for name in BY_NAME if name.removesuffix(".*") in there and not name.endswith(".*")) == []
    assert sorted(name for name in BY_NAME if name.endswith(".*") and name[:-2] not in {*modules, *ATTRIBUTES}) == []


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
        "started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "import deepspeed\n"
        "deepspeed.zero, deepspeed.comm, deepspeed.utils\n"
        "seconds = time.process_time() - started\n"
        "print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, torch.cuda.is_initialized())\n"
    )
    found: list[list[str]] = []

    def measure() -> float:
        done = subprocess.run(
            [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=True
        )
        found.append(done.stdout.split())
        return float(found[-1][0])

    assert least_seconds(measure) < 0.03
    assert min(int(kilobytes) for _, kilobytes, _ in found) < 10 << 10
    assert {has_context for _, _, has_context in found} == {"False"}
