from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from support.cli import clean_environment, invoke, run_dsrun

#: Says what it was given, and prints an id as sbatch does.
SBATCH = """#!/bin/sh
cp "$2" "$(dirname "$0")/submitted"
echo "$1" > "$(dirname "$0")/option"
echo "4711;cluster"
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "stage9.json").write_text('{"zero_optimization": {"stage": 9}}')
    monkeypatch.chdir(tmp_path)


def environment(folder: Path, sbatch: str | None) -> dict[str, str]:
    programs = folder / "bin"
    programs.mkdir()
    if sbatch is not None:
        (programs / "sbatch").write_text(sbatch)
        (programs / "sbatch").chmod(0o700)
    return clean_environment(PATH=f"{programs}:/usr/bin:/bin" if sbatch else str(programs), XDG_STATE_HOME=str(folder))


def test_a_script_for_deepspeed_keeps_a_config_of_its_own_on_the_way() -> None:
    result = invoke("slurm", "--print", "--as-deepspeed", "train.py", "--config", "recipe.yaml", "--", "--nodes", "4")
    assert result.exit_code == 0, result.stderr
    assert "--as-deepspeed train.py --config recipe.yaml" in result.stdout


def test_print_shows_the_script_and_submits_nothing() -> None:
    result = invoke("slurm", "--print", "-n", "2", "train.py", "--lr", "1e-3", "--", "--nodes", "4", "--time", "2h")
    assert result.exit_code == 0
    assert result.stdout.startswith("#!/bin/sh\n#SBATCH --job-name=train\n")
    assert "#SBATCH --nodes 4\n#SBATCH --time=0-02:00:00\n" in result.stdout
    assert result.stdout.endswith(f"exec {sys.executable} -m dsrun run -n 2 train.py --lr 1e-3\n")


def test_the_scripts_own_double_dash_stays_where_the_last_one_is_sbatchs() -> None:
    result = invoke("slurm", "--print", "train.py", "--", "--config", "mine", "--", "--nodes=2")
    assert result.stdout.endswith("dsrun run train.py -- --config mine\n")
    assert "#SBATCH --nodes=2\n" in result.stdout


def test_a_submitted_job_is_told_by_its_id_and_its_script_is_kept_for_its_user_alone(tmp_path: Path) -> None:
    result = run_dsrun("slurm", "train.py", "--", "-N2", cwd=tmp_path, env=environment(tmp_path, SBATCH))
    assert (result.exit_code, result.stdout) == (0, "4711\n")
    assert f"its output goes to {tmp_path}/slurm-4711.out" in result.stderr
    (script,) = (tmp_path / "dsrun" / "slurm").iterdir()
    assert stat.S_IMODE(script.stat().st_mode) == 0o600
    assert stat.S_IMODE(script.parent.stat().st_mode) == 0o700
    assert (tmp_path / "bin" / "submitted").read_bytes() == script.read_bytes()
    assert (tmp_path / "bin" / "option").read_text() == "--parsable\n"


def test_json_names_id_script_and_output(tmp_path: Path) -> None:
    result = run_dsrun("slurm", "--json", "train.py", cwd=tmp_path, env=environment(tmp_path, SBATCH))
    shown = json.loads(result.stdout)
    assert (shown["schema_version"], shown["slurm_job_id"]) == (1, "4711")
    assert shown["output"] == f"{tmp_path}/slurm-4711.out"
    assert Path(shown["script"]).exists()


def test_without_sbatch_there_is_a_way_out(tmp_path: Path) -> None:
    result = run_dsrun("slurm", "train.py", cwd=tmp_path, env=environment(tmp_path, None))
    assert result.exit_code == 1
    assert "error: there is no `sbatch` here" in result.stderr
    assert "dsrun slurm --print" in result.stderr


def test_a_refusal_comes_in_slurms_own_words(tmp_path: Path) -> None:
    refuses = "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n"
    result = run_dsrun("slurm", "train.py", "--", "-p", "gpu", cwd=tmp_path, env=environment(tmp_path, refuses))
    assert result.exit_code == 1
    assert "error: Slurm refuses the job: invalid partition specified: gpu\n" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script is named"),
        (["--", "--nodes", "2"], "no script is named"),
        (["trian.py"], "trian.py"),
        (["--nonsense", "train.py"], "`dsrun run` has no option `--nonsense`"),
        (["-n", "many", "train.py"], "expected a number of ranks"),
        (["-d", "train.py"], "`--detach` makes no sense with `dsrun slurm`"),
        (["--queue", "train.py"], "`--queue` makes no sense with `dsrun slurm`"),
        (["--dry-run", "train.py"], "`--print` shows what would be submitted"),
        (["--node-rank", "0", "train.py"], "dsrun starts the ranks of all nodes of the Slurm job"),
        (["train.py", "--config", "stage9.json"], "stage9.json:1:33: `zero_optimization.stage` is 9"),
        (["train.py", "--config", "none.json"], "none.json"),
        (["train.py", "--", "--time", "soon"], "`--time` is 'soon'; expected a time"),
        (["train.py", "--", "checkpoints", "--nodes", "2"], "`checkpoints` is no option of sbatch"),
        (["train.py", "--", "--nodes=2", "checkpoints"], "`checkpoints` is no option of sbatch"),
    ],
)
def test_what_would_fail_on_the_node_is_refused_before_it_is_submitted(words: list[str], message: str) -> None:
    result = invoke("slurm", "--print", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
