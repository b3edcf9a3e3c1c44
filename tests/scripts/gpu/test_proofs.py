"""The run of the tests that need a GPU, with example tests that need none: none of them can end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu.proofs
import pytest
from gpu.proofs import candidates, folder_of, listed, run

MARKS = {
    "conftest.py": """
        import pytest

        @pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
        def device(request):
            return request.param

        @pytest.fixture
        def bus(device):
            return [device]
        """,
    "support/marks.py": """
        import pytest

        on_gpu = pytest.mark.cuda
        """,
    "a/test_own.py": """
        import pytest

        @pytest.mark.cuda
        def test_one():
            pass

        def test_other():
            pass
        """,
    "a/test_fixture.py": """
        def test_both(device):
            pass
        """,
    "b/test_fixture_of_a_fixture.py": """
        def test_both(bus):
            pass
        """,
    "b/test_imported.py": """
        from support.marks import (
            on_gpu,
        )

        pytestmark = on_gpu

        def test_all():
            pass
        """,
    "b/test_seconds.py": """
        import pytest

        pytestmark = pytest.mark.gpu_seconds(2)

        def test_as_the_file_says(device):
            pass

        @pytest.mark.gpu_seconds(0.5)
        def test_as_it_says_itself(device):
            pass
        """,
    "b/test_none.py": """
        def test_nothing():
            assert dict(device=1)
        """,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of tests, as this project has one, with a pyproject.toml beside it."""
    options = (
        '[tool.pytest.ini_options]\npythonpath = ["tests"]\naddopts = "--no-such-option"\nfilterwarnings = ["error"]\n'
    )
    (tmp_path / "pyproject.toml").write_text(options + 'markers = ["cuda: needs a GPU", "gpu_seconds(n): there"]\n')
    (tmp_path / "tests").mkdir()
    return tmp_path / "tests"


def write(root: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        (root / name).write_text("\n".join(line[indent:] for line in lines) + "\n")
    return [root / name for name in files]


def run_tests(root: Path, text: str, **words: Any) -> dict[str, Any]:
    files = write(root, {"x/test_x.py": text})
    return run(files, root=root, marker=words.pop("marker", "not cuda"), **{"limit_s": 60.0, **words})


def states(report: dict[str, Any]) -> dict[str, str]:
    return {test["id"].partition("::")[2]: test["state"] for test in report["tests"]}


def test_marked_tests_are_found_whatever_way_they_are_marked_with_the_seconds_that_they_say(root: Path) -> None:
    write(root, MARKS)
    assert [path.name for path in candidates(root)] == [
        "test_fixture.py",
        "test_own.py",
        "test_fixture_of_a_fixture.py",
        "test_imported.py",
        "test_seconds.py",
    ]
    found = listed(candidates(root), root=root, marker="cuda")
    assert found == {
        "tests": 6,
        "errors": {},
        "folders": {
            "a": {"tests/a/test_fixture.py::test_both[cuda]": 0.4, "tests/a/test_own.py::test_one": 0.4},
            "b": {
                "tests/b/test_fixture_of_a_fixture.py::test_both[cuda]": 0.4,
                "tests/b/test_imported.py::test_all": 0.4,
                "tests/b/test_seconds.py::test_as_the_file_says[cuda]": 2.0,
                "tests/b/test_seconds.py::test_as_it_says_itself[cuda]": 0.5,
            },
        },
    }


def test_a_file_that_cannot_be_imported_fails_the_listing_and_keeps_the_others(root: Path) -> None:
    files = write(root, {"a/test_a.py": "def test_a(): pass", "a/test_b.py": "import no_such_package"})
    found = listed(files, root=root, marker="not cuda")
    assert found["folders"] == {"a": {"tests/a/test_a.py::test_a": 0.4}}
    assert "no_such_package" in found["errors"]["tests/a/test_b.py"]
    assert found["why"] == "could not be collected: tests/a/test_b.py"


def test_every_test_has_a_row_with_its_state_seconds_and_reason(root: Path) -> None:
    report = run_tests(
        root,
        """
        import time, warnings
        import pytest

        def test_passes():
            warnings.warn("old way", FutureWarning)

        def test_fails():
            assert 2 + 2 == 5

        @pytest.mark.skip(reason="needs two GPUs")
        def test_skips():
            pass

        @pytest.fixture
        def broken():
            yield
            raise RuntimeError("teardown")

        def test_breaks_behind(broken):
            pass
        """,
    )
    passes, fails, skips, breaks = report["tests"]
    assert [test["state"] for test in report["tests"]] == ["passed", "failed", "skipped", "failed"]
    assert passes["warnings"] == ["FutureWarning: old way"], "an older package's warning fails no proof, but is told"
    assert "assert (2 + 2) == 5" in fails["message"]
    assert "needs two GPUs" in skips["message"]
    assert "RuntimeError: teardown" in breaks["message"]
    assert all(test["seconds"] >= 0 for test in report["tests"])
    assert {key: report[key] for key in ("passed", "failed", "skipped", "not run")} == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "not run": 0,
    }
    assert report["why"] == "2 failed: tests/x/test_x.py::test_fails, tests/x/test_x.py::test_breaks_behind"


def test_a_test_that_kills_its_process_is_one_failure_and_the_others_run(root: Path) -> None:
    report = run_tests(
        root,
        """
        import os

        def test_before():
            pass

        def test_aborts():
            print("the last words")
            os.abort()

        def test_leaves():
            os._exit(0)

        def test_behind():
            pass
        """,
    )
    assert states(report) == {
        "test_before": "passed",
        "test_aborts": "failed",
        "test_leaves": "failed",
        "test_behind": "passed",
    }
    assert report["deaths"] == [
        "tests/x/test_x.py::test_aborts: its process ended by signal SIGABRT",
        "tests/x/test_x.py::test_leaves: its process ended by exit code 0",
    ]
    assert "test_aborts" in report["tests"][1]["message"], "faulthandler's stack"


def test_a_test_that_hangs_is_one_failure_and_the_others_run(root: Path) -> None:
    report = run_tests(
        root,
        """
        import signal, time

        def test_hangs():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as in a call that never comes back
            time.sleep(600)

        def test_behind():
            pass
        """,
        silence_s=1.0,
    )
    assert states(report) == {"test_hangs": "failed", "test_behind": "passed"}
    assert report["deaths"] == ["tests/x/test_x.py::test_hangs: nothing happened for 1 s"]


def test_behind_a_lost_device_the_others_have_another_process(root: Path) -> None:
    report = run_tests(
        root,
        """
        import os, sys
        from types import SimpleNamespace

        def refuse():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def test_loses_it():
            cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=refuse)
            sys.modules["torch"] = SimpleNamespace(cuda=cuda)
            assert False, os.getpid()

        def test_behind():
            assert "torch" not in sys.modules
        """,
    )
    assert states(report) == {"test_loses_it": "failed", "test_behind": "passed"}
    assert "the device answers nothing any more: CUDA error: an illegal memory" in report["tests"][0]["message"]


def test_a_process_that_dies_behind_its_last_test_is_a_failure(root: Path) -> None:
    report = run_tests(
        root,
        """
        import atexit, os

        def test_passes():
            atexit.register(os.abort)
        """,
    )
    assert states(report) == {"test_passes": "passed"}
    assert report["why"].startswith("behind tests/x/test_x.py::test_passes: its process ended by signal SIGABRT")


@pytest.mark.parametrize("text", ["def test_a(): pass", "x = 1"], ids=["deselected", "empty"])
def test_no_test_at_all_is_a_failure(root: Path, text: str) -> None:
    report = run_tests(root, text, marker="cuda")
    assert report["tests"] == []
    assert "no test was collected" in report["why"]


def test_a_file_that_cannot_be_imported_is_a_failure_and_the_others_run(root: Path) -> None:
    files = write(root, {"x/test_x.py": "import no_such_package", "x/test_y.py": "def test_y(): pass"})
    report = run(files, root=root, marker="not cuda", limit_s=60)
    assert states(report) == {"test_y": "passed"}
    assert report["why"] == "could not be collected: tests/x/test_x.py"


def test_where_all_are_skipped_nothing_was_proved(root: Path) -> None:
    text = "import pytest\npytestmark = pytest.mark.skip(reason='no GPU')\ndef test_a(): pass"
    assert run_tests(root, text)["why"] == "all were skipped: Skipped: no GPU"


def test_what_there_is_no_time_for_has_not_run_and_has_not_failed(root: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    report = run_tests(
        root,
        f"""
        import time

        def test_first():
            pass

        def test_long():
            open({str(begun)!r}, "w").close()
            time.sleep(600)

        def test_behind():
            pass
        """,
        must_end=begun.exists,
    )
    assert states(report) == {"test_first": "passed", "test_long": "not run", "test_behind": "not run"}
    assert (report["failed"], report["not run"]) == (0, 2)
    assert report["why"].startswith("2 not run; tests/x/test_x.py::test_long: no time was left")


def test_a_limit_ends_it_too(root: Path) -> None:
    report = run_tests(root, "import time\ndef test_long(): time.sleep(600)", limit_s=0.0)
    assert "no time was left" in report["why"]


def test_a_part_that_is_asked_to_end_prints_the_rows_that_it_has(root: Path) -> None:
    text = "import os, signal, time\ndef test_long():\n os.kill(os.getppid(), signal.SIGTERM)\n time.sleep(600)"
    (file,) = write(root, {"x/test_x.py": text})
    words = ("-m", "gpu.proofs", "--root", str(root), "--marker", "not cuda", str(file))
    scripts = str(Path(gpu.proofs.__file__).parents[1])
    run_ = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": scripts}
    )
    assert run_.returncode == 1
    assert states(json.loads(run_.stdout)) == {"test_long": "not run"}


@pytest.mark.parametrize(
    ("test_id", "folder"),
    [("tests/runtime/memory/test_a.py::test_b[x/y]", "runtime/memory"), ("tests/test_a.py", "."), ("a/b.py", "a")],
)
def test_a_tests_folder_is_that_of_its_file(test_id: str, folder: str) -> None:
    assert folder_of(test_id) == folder
