"""The `config` verb: what it prints where, and its exit codes. What it knows is tested in tests/shared/config."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from dsrun.config.load import load
from support.cli import clean_environment, invoke
from support.core_speed import program_core_seconds

GOOD = '{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}'
BAD = '{"train_micro_batch_size_per_gpu": 4,\n "gradient_clipping": 1.0,\n "zero_optimization": {"stgae": 2}}'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.json").write_text(GOOD)
    (tmp_path / "bad.json").write_text(BAD)
    (tmp_path / "hosts").write_text("localhost slots=3\nworker-1 slots=4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verb", ["check", "show", "explain", "schema", "migrate"])
def test_every_verb_has_help(verb: str) -> None:
    result = invoke("config", verb, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: dsrun config {verb}")


def test_check_says_all_findings_and_exits_with_2() -> None:
    result = invoke("config", "check", "good.json", "bad.json", "none.json")
    assert result.exit_code == 2
    assert result.stdout == "good.json: ok\n"
    assert result.stderr == (
        "error: bad.json:3:24: `zero_optimization.stgae` is not a key of `zero_optimization`\n"
        "hint: did you mean `zero_optimization.stage`?\n"
        "error: file not found: none.json\n"
        "hint: did you mean `good.json` or `bad.json`?\n"
    )


def test_check_prints_json_for_ci() -> None:
    result = invoke("config", "check", "--json", "good.json", "bad.json")
    assert (result.exit_code, result.stderr) == (2, "")
    assert json.loads(result.stdout) == [
        {"file": "good.json", "ok": True, "findings": []},
        {
            "file": "bad.json",
            "ok": False,
            "findings": [
                {
                    "severity": "error",
                    "code": "unknown-key",
                    "key": "zero_optimization.stgae",
                    "message": "`zero_optimization.stgae` is not a key of `zero_optimization`",
                    "hint": "did you mean `zero_optimization.stage`?",
                    "file": "bad.json",
                    "line": 3,
                    "column": 24,
                }
            ],
        },
    ]


def test_check_takes_the_number_of_ranks_from_a_hostfile(folder: Path) -> None:
    (folder / "batch.json").write_text('{"train_batch_size": 20, "gradient_clipping": 1}')
    assert invoke("config", "check", "-w", "5", "batch.json").exit_code == 0
    result = invoke("config", "check", "--hostfile", "hosts", "batch.json")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: batch.json:1:2: `train_batch_size` 20 is no multiple of 7, the data-parallel size (all 7 ranks)\n"
        "hint: nearest that fits: `train_batch_size` 21 = micro batch 3 x accumulation 1 x data-parallel size 7\n"
    )
    both = invoke("config", "check", "-w", "5", "-H", "hosts", "batch.json")
    assert (both.exit_code, both.stdout) == (2, "")


def test_show_prints_values_with_sources() -> None:
    result = invoke("config", "show", "good.json", "-w", "2", "--diff-defaults")
    assert result.exit_code == 0
    assert result.stdout == (
        "train_batch_size                8  derived, from the other batch sizes and the number of ranks\n"
        "train_micro_batch_size_per_gpu  4  good.json:1:2\n"
        "gradient_accumulation_steps     1  derived, from the other batch sizes and the number of ranks\n"
        "zero_optimization.stage         2  good.json:1:87\n"
    )


def test_show_json_is_a_config_that_loads_as_the_same() -> None:
    result = invoke("config", "show", "good.json", "--json")
    assert load(json.loads(result.stdout)).model_dump() == load("good.json").model_dump()


def test_show_refuses_what_check_refuses() -> None:
    result = invoke("config", "show", "bad.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: bad.json:3:24: ")


def test_explain_finds_a_key_by_the_end_of_its_path() -> None:
    result = invoke("config", "explain", "stage")
    assert result.exit_code == 0
    assert result.stdout.startswith("zero_optimization.stage\n  What is sharded")
    assert invoke("config", "explain").stdout.startswith("train_batch_size ")
    assert invoke("config", "explain", "stgae").exit_code == 2


def test_schema_is_json() -> None:
    assert json.loads(invoke("config", "schema").stdout)["title"] == "dsrun training config"


def test_migrate_prints_the_new_file_and_says_what_is_left(folder: Path) -> None:
    (folder / "old.json").write_text('{"bfloat16": {"enabled": true}}')
    result = invoke("config", "migrate", "old.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {"_migrated": ["`bfloat16` is written as `bf16`"], "bf16": {"enabled": True}}
    left = invoke("config", "migrate", "bad.json")
    assert left.exit_code == 2
    assert "stgae" in left.stdout
    assert left.stderr.startswith("error: bad.json:3:24: `zero_optimization.stgae` is not a key")


@pytest.mark.depends_on_speed("seconds of a core, beside those of the libraries")
def test_check_is_quick() -> None:
    def seconds(*words: str) -> float:
        return program_core_seconds([sys.executable, *words], tries=4, env=clean_environment())

    # 0.25 s is the promise on the machine the project is made on; here they are counted by what it takes to load the
    # libraries that are needed at least.
    libraries = (
        "-c",
        "import click; from pydantic import BaseModel, Field, create_model; create_model('A', b=(int, 1))",
    )
    assert seconds("-m", "dsrun", "config", "check", "good.json") < 3 * seconds(*libraries)


def test_check_takes_inline_json_and_base64_as_the_other_verbs_do() -> None:
    text = '{"train_batch_size": 8, "gradient_clipping": 1.0}'
    for source in (text, base64.urlsafe_b64encode(text.encode()).decode()):
        result = invoke("config", "check", source)
        assert (result.exit_code, result.stdout, result.stderr) == (0, f"{source}: ok\n", "")
    assert (
        "<inline>:1:25: `colour` is not a key"
        in invoke("config", "check", '{"train_batch_size": 8, "colour": 1}').stderr
    )
    broken = invoke("config", "check", '{"train_batch_size": 8')
    assert (broken.exit_code, broken.stdout) == (2, "")
    assert broken.stderr.startswith("error: <inline>:1:")


def test_show_hides_a_key(folder: Path) -> None:
    (folder / "key.json").write_text(GOOD.replace("}}", '}, "comet": {"enabled": true, "api_key": "sEcReTsEcReT"}}'))
    shown = invoke("config", "show", "key.json").stdout
    assert "sEcReTsEcReT" not in shown
    assert "comet.api_key" in shown
