"""The questions by which transformers, accelerate, trl and peft decide whether there is a DeepSpeed, and which."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from dsrun.as_deepspeed.search_path import SITE
from dsrun.as_deepspeed.version import STANDARD
from support.cli import clean_environment

#: Each one's own functions for the question, and what it asks for in the version that pyproject.toml names.
_QUESTIONS = {
    "transformers": """
from transformers.dependency_versions_check import dep_version_check
from transformers.integrations import deepspeed as hf
from transformers.utils.versions import require_version
dep_version_check("deepspeed")
require_version("deepspeed>=0.9.3")
require_version("deepspeed>=0.19.8")
found["is there"] = hf.is_deepspeed_available()
found["has a config of its own"] = hf.HfDeepSpeedConfig.__mro__[1] is not object
""",
    "accelerate": """
from accelerate.utils import imports, DummyOptim
from accelerate.utils.versions import compare_versions
import accelerate.utils.deepspeed, accelerate.accelerator
found["is there"] = imports.is_deepspeed_available()
found["has its wrapper"] = hasattr(accelerate.accelerator, "DeepSpeedEngineWrapper")
for oldest in ("0.3.1", "0.5.5", "0.9.3", "0.11.0", "0.14.0", "0.14.4", "0.14.5", "0.16.4", "0.18.2"):
    found[oldest] = compare_versions("deepspeed", ">=", oldest) and not compare_versions("deepspeed", "<", oldest)
import deepspeed
found["by attribute"] = "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
import torch
model = torch.nn.Linear(2, 2)
from accelerate.utils import extract_model_from_parallel
found["unwraps"] = extract_model_from_parallel(model) is model
""",
    "trl": """
from trl.import_utils import is_deepspeed_available
from packaging.version import Version
import trl.models.utils, deepspeed
found["is there"] = is_deepspeed_available()
found["new hooks"] = Version(deepspeed.__version__) >= Version("0.16.4")
found["as text"] = deepspeed.version >= "0.16.4"
""",
    "peft": """
from peft.utils.integrations import check_deepspeed_zero3_enabled, gather_params_ctx
found["is asked"] = check_deepspeed_zero3_enabled() is False
with gather_params_ctx([]):
    found["gathers nothing"] = True
""",
}


def _is_missing(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return True
    return False


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, bool]]:
    """The answers of all that are installed, in one process: their imports are slow."""
    parts = "".join(
        f"found = answers[{name!r}] = {{}}\n{text}" for name, text in _QUESTIONS.items() if not _is_missing(name)
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import json\nanswers = {{}}\n{parts}\nprint(json.dumps(answers))"],
        env=clean_environment(PYTHONPATH=SITE, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"(as {STANDARD})" in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("client", _QUESTIONS)
def test_a_client_finds_a_deepspeed_that_is_new_enough(client: str, answers: dict[str, dict[str, bool]]) -> None:
    if _is_missing(client):
        pytest.skip(f"{client} is not installed: pip install -e '.[test-clients]'")
    assert answers[client]
    assert {question: answer for question, answer in answers[client].items() if not answer} == {}
