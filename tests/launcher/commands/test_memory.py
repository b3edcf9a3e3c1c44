"""`dsrun memory` on records that a run would have left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.memory_use.samples import MemorySample, TierUse, to_record
from dsrun.memory_use.stacks import StacksAtPeak, StackUse, stacks_record
from support.cli import invoke
from support.job_records import leave_job

MIB = 1 << 20


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return leave_job(tmp_path / "dsrun" / "jobs", "trained", outcome="done")


def write_records(folder: Path) -> None:
    records = [{"event": "memory", "state_predicted_bytes": 4 * MIB, "state_bytes": 4 * MIB}]
    for phase, live, peak in (("start", 10, 30), ("forward", 90, 100), ("backward", 20, 120), ("update", 10, 120)):
        use = TierUse(
            tier="cpu",
            held_bytes=(live + 10) * MIB,
            peak_bytes=peak * MIB,
            live_bytes=live * MIB,
            reserved_bytes=(live + 5) * MIB,
            kinds=(("parameters", 4 * MIB),),
        )
        sample = MemorySample(step=1, phase=phase, tiers=(use,))
        records.append({"event": "memory_sample", **to_record(sample)})
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_bars_peak_and_state_are_shown(job: Path) -> None:
    write_records(job)
    shown = invoke("memory", "trained")
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0] == "model state 4.0 MiB predicted, 4.0 MiB measured (+0.0%)"
    assert "host memory over step 1" in lines
    assert "host peak 120.0 MiB, most of it activations and temporaries, seen in step 1" in lines
    assert all(len(line) <= 88 for line in lines)


def test_json_has_the_peak_by_owner_and_every_sample(job: Path) -> None:
    write_records(job)
    body = json.loads(invoke("memory", "--json", "trained").stdout)
    cpu = body["tiers"]["cpu"]
    assert (cpu["peak"]["owner"], cpu["peak"]["nbytes"]) == ("activations and temporaries", 120 * MIB)
    assert sum(cpu["peak"]["parts"].values()) == 120 * MIB
    assert [moment["phase"] for moment in cpu["over_step"]] == ["start", "forward", "backward", "update"]
    assert sum(cpu["over_step"][1]["bytes"].values()) == 100 * MIB
    assert (cpu["fragmentation"]["advice"], cpu["growth"], len(body["samples"])) == (None, None, 4)


def test_stacks_at_the_peak_are_shown_where_they_were_recorded(job: Path) -> None:
    write_records(job)
    stacks = (StackUse(nbytes=MIB, count=2, frames=("model.py:12 block",)),)
    found = StacksAtPeak(peak_bytes=3 * MIB, before_bytes=2 * MIB, stacks=stacks)
    with (job / "records.jsonl").open("a") as file:
        file.write(json.dumps({"event": "memory_history", "time": 1.5, **stacks_record(found)}) + "\n")
    assert invoke("memory", "trained").stdout.endswith(
        "GPU peak of the recorded steps 3.0 MiB, of it 2.0 MiB from before them\n"
        "     1.0 MiB      2 x  model.py:12 block\n"
    )
    assert json.loads(invoke("memory", "--json", "trained").stdout)["stacks"]["stacks"][0]["count"] == 2


def test_a_picture_is_drawn_where_it_is_asked_for(job: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_records(job)
    picture = tmp_path / "memory.svg"
    shown = invoke("memory", "trained", "--plot", str(picture))
    assert (shown.exit_code, shown.stderr) == (0, f"dsrun: {picture} was drawn\n")
    assert "<svg" in picture.read_text()


def test_a_job_without_records_is_told_so(job: Path) -> None:
    shown = invoke("memory", "trained")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith("error: job trained has recorded no memory\nhint: records come from ")
