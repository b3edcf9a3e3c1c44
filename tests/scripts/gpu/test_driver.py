"""The driver of the GPU check, with parts made up here: whatever one does, it is a row, and the others run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gpu.driver import Comparison, Part, Row, chosen, estimate_s, run_all, run_part, summary


def program(code: str, name: str = "part", *, limit_s: float = 30.0, **words: Any) -> Part:
    return Part(name, (sys.executable, "-S", "-c", code), limit_s, words.pop("estimate_s", 0.0), **words)


def row_of(code: str, *, limit_s: float = 30.0) -> Row:
    return run_part(program(code, limit_s=limit_s), patience_s=60, grace_s=0.5)


@pytest.mark.parametrize(
    "printed",
    [
        '{"a": 1}',
        '{\n "a": 1\n}',
        'talk\n{"a": 0}\n{"a": 1}\nmore talk',
        'talk\n[rank 0] {"a": 1}',
        '{"a": 1}\n{"a": 2, "cut of',
    ],
    ids=["line", "document", "last", "tagged", "cut"],
)
def test_the_last_whole_object_that_a_part_prints_is_its_result(printed: str) -> None:
    row = row_of(f"print({printed!r})")
    assert (row["state"], row["result"]) == ("ok", {"a": 1})
    assert row["seconds"] >= 0


@pytest.mark.parametrize(
    "code",
    [
        "",
        "print('no JSON here')",
        "print('{broken')",
        "print('[1, 2]')",
        "import os; os.write(1, bytes(range(256)))",
    ],
    ids=["nothing", "talk", "broken", "list", "binary"],
)
def test_a_part_that_ends_well_without_a_result_has_failed(code: str) -> None:
    row = row_of(code)
    assert (row["state"], row["why"]) == ("failed", "it ended well, but printed no result")


def test_a_part_that_fails_keeps_what_it_had_and_what_it_said() -> None:
    row = row_of("import sys; print('{\"rows\": 3}'); sys.exit('the device is full')")
    assert (row["state"], row["why"], row["result"]) == ("failed", "exit code 1", {"rows": 3})
    assert "the device is full" in row["said"]


def test_a_part_says_itself_why_it_failed() -> None:
    row = row_of('import sys; print(\'{"why": "stage 2 differs"}\'); sys.exit(1)')
    assert row["why"] == "stage 2 differs"


def test_a_part_that_dies_is_named_by_its_signal() -> None:
    assert row_of("import os; os.abort()")["why"] == "ended by SIGABRT"


def test_a_program_that_is_not_there_is_a_failed_row() -> None:
    row = run_part(Part("gone", ("/nowhere/at-all",), 1, 0), patience_s=9)
    assert row["state"] == "failed"
    assert "could not be started" in row["why"]
    assert "/nowhere/at-all" in row["why"]


@pytest.mark.depends_on_speed("20 s in all")
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_part_that_hangs_is_ended_and_keeps_what_it_had(stubborn: bool) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stubborn else ""
    code = f"import signal, time; {deaf} print('{{\"a\": 1}}', flush=True); time.sleep(600)"
    started_s = time.monotonic()
    row = row_of(code, limit_s=0.5)
    assert time.monotonic() - started_s < 20
    assert (row["state"], row["why"], row["result"]) == ("failed", "not done after 0 s", {"a": 1})


def test_what_a_part_leaves_behind_is_ended_and_said() -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print('{\"child\": %d}' % p.pid)"
    row = row_of(child)
    assert (row["state"], row["left"]) == ("ok", "processes, which were ended")
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(row["result"]["child"])], capture_output=True, text=True)
    assert state.stdout.strip() in ("", "Z"), "it is gone, or was and waits for init"


def test_what_goes_by_itself_in_a_moment_is_not_left_behind() -> None:
    child = "import subprocess; subprocess.Popen(['sleep', '0.2']); print('{}')"
    row = run_part(program(child), patience_s=60, grace_s=20)
    assert row["state"] == "ok"
    assert "left" not in row


def test_a_part_for_which_too_little_time_is_left_is_not_begun() -> None:
    row = run_part(program("raise SystemExit(1)", estimate_s=40), patience_s=12)
    assert row == {"state": "not run", "why": "no time was left: 12 s, and it takes about 40 s"}


def test_the_rest_of_the_time_is_a_limit_too() -> None:
    row = run_part(program("import time; time.sleep(600)", limit_s=900), patience_s=0.3, grace_s=0.5)
    assert (row["state"], row["why"]) == ("failed", "not done after 0 s")


def test_a_part_whose_package_is_not_here_is_not_run() -> None:
    row = run_part(program("", needs="no_such_package"), patience_s=9)
    assert row == {"state": "not run", "why": "no_such_package is not installed"}


def test_each_row_is_in_the_file_before_the_next_part_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "results.json"
    reads = f"import json; print(json.dumps({{'seen': list(json.load(open({str(out)!r}))['parts'])}}))"
    parts = [
        program("print('{}')", "one"),
        program("import os; os.kill(os.getpid(), 9)", "two"),
        Comparison(
            "three", lambda rows: {"state": "ok", "result": {"states": [row["state"] for row in rows.values()]}}
        ),
        program(reads, "four"),
    ]
    went = run_all(parts, out=out, minutes=1, report={"machine": {}}, derived=lambda rows: {"count": len(rows)})
    assert not went
    report = json.loads(out.read_text())
    assert {name: row["state"] for name, row in report["parts"].items()} == {
        "one": "ok",
        "two": "failed",
        "three": "ok",
        "four": "ok",
    }
    assert report["parts"]["three"]["result"] == {"states": ["ok", "failed"]}
    assert report["parts"]["four"]["result"] == {"seen": ["one", "two", "three"]}
    assert report["count"] == 4
    talk = capfd.readouterr().err.splitlines()
    assert talk[1] == "two: failed (0 s): ended by SIGKILL"
    assert talk[-1] == "3 passed, 1 failed, 0 skipped"


def test_a_peer_that_fails_is_a_result_and_is_not_tried_again(tmp_path: Path) -> None:
    parts = [
        program("raise SystemExit(1)", "peer round 0", is_ours=False),
        program("print('{}')", "peer round 1", is_ours=False, again="peer round 0"),
    ]
    report: dict[str, Any] = {}
    assert run_all(parts, out=tmp_path / "results.json", minutes=1, report=report)
    assert report["parts"]["peer round 1"] == {"state": "not run", "why": "peer round 0 failed"}


def test_where_nothing_can_run_the_first_part_says_why_and_the_way_out(tmp_path: Path) -> None:
    parts = [program("", "probe"), program("", "proofs a"), Comparison("losses", lambda _: {"state": "ok"})]
    report: dict[str, Any] = {}
    refusal = "packages are missing: xxhash>=3.4\nhint: this way"
    assert not run_all(parts, out=tmp_path / "results.json", minutes=1, report=report, refusal=refusal)
    assert report["parts"] == {
        "probe": {"state": "failed", "why": refusal},
        "proofs a": {"state": "not run", "why": "nothing can run here: see probe"},
        "losses": {"state": "not run", "why": "nothing can run here: see probe"},
    }


def test_parts_are_asked_for_by_the_beginnings_of_their_names() -> None:
    parts = [program("", "proofs a", estimate_s=3), program("", "llama b", estimate_s=4)]
    extra = program("", "offload c", estimate_s=5, is_extra=True)
    assert chosen([*parts, extra], ()) == parts
    assert chosen([*parts, extra], ("offload", "proofs")) == [parts[0], extra]
    assert estimate_s([*parts, extra]) == 12


def test_the_summary_counts_peers_apart() -> None:
    rows: Mapping[str, Row] = {
        "a": {"state": "ok"},
        "b": {"state": "failed"},
        "c": {"state": "not run"},
        "d": {"state": "failed"},
    }
    assert summary(rows, ["a", "b", "c"]) == "1 passed, 1 failed, 1 skipped, 1 of peers failed"
    assert summary({"a": {"state": "ok"}}, ["a"]) == "1 passed, 0 failed, 0 skipped"


def test_the_driver_opens_no_device_for_it_imports_no_torch() -> None:
    code = "import sys, gpu.check; raise SystemExit(sorted({'torch', 'numpy', 'pynvml'} & set(sys.modules)) or 0)"
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_a_part_is_asked_to_end_before_it_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    code = (
        "import signal, subprocess, sys, time; "
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(mark)!r}, 'w').close(), sys.exit(0))); "
        "print('{}', flush=True); time.sleep(600)"
    )
    row = run_part(program(code, limit_s=1.0), patience_s=60, grace_s=20)
    assert row["why"] == "not done after 1 s"
    assert mark.exists(), f"{signal.SIGTERM.name} came first, so that a launcher could end its ranks"
