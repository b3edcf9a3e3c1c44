"""A job's output over all its attempts: logs go on, events are masked and in order, pulses become live.json."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.jobs.live_status import read_live
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.logs.reader import read_log
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from dsrun.launcher.protocol import Output, RankStatus, RankTraceBytes
from support.jobs import RecordingSink


def plan_for(folder: Path, *, env: dict[str, str] | None = None) -> LaunchPlan:
    return make_plan(
        Allocation(
            hosts=(
                HostSpec(name="a", slots=1, source="test"),
                HostSpec(name="b", slots=1, source="test", env={"B_TOKEN": "secret-of-host"}),
            )
        ),
        Program(kind="script", target="t.py", args=(), python="python"),
        job_id="j",
        start="fork",
        cwd="/",
        env=env or {},
        run_dir=str(folder),
        grace_s=1,
        nonce="nonce-of-this-job",
    )


def out(rank: int, text: str, time_s: float = 1.0) -> Output:
    return Output(rank=rank, stream="stdout", sequence=0, time_s=time_s, text=text)


def pulse(rank: int, step: int) -> RankStatus:
    return RankStatus(
        rank=rank,
        beats=1,
        step=step,
        idle_s=0.5,
        waited_s=1.0,
        phase="forward",
        collective="",
        cpu_percent=99.0,
        rss_bytes=1 << 20,
    )


def events_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_restarted_job_goes_on_in_the_same_files(tmp_path: Path) -> None:
    console = RecordingSink()
    output = JobOutput(plan_for(tmp_path), console)
    for attempt in range(3):
        output.event("start", attempt=attempt, world_size=2)
        output.take(out(0, f"try {attempt}\n"))
        for rank in (0, 1):
            output.ended(rank, None)
    output.close()
    text = (tmp_path / "rank0.log").read_text()
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text) == (
        "try 0\n--- dsrun: attempt 2 starts TIME ---\ntry 1\n--- dsrun: attempt 3 starts TIME ---\ntry 2\n"
    )
    assert (tmp_path / "rank1.log").read_text() == ""
    assert console.texts(0) == ["try 0", "try 1", "try 2"]


def test_notes_are_shown_recorded_and_read_back(tmp_path: Path) -> None:
    console = RecordingSink()
    output = JobOutput(plan_for(tmp_path), console)
    output.take(out(0, "a\n"))
    output.note("stopping 2 ranks")
    output.close()
    assert console.notes == ["stopping 2 ranks"]
    assert [(line.rank, line.text) for line in read_log(tmp_path)] == [(0, "a"), (None, "stopping 2 ranks")]


def test_secrets_of_plan_and_environment_are_hidden_in_what_dsrun_says_and_kept_in_what_ranks_say(
    tmp_path: Path,
) -> None:
    console = RecordingSink()
    plan = plan_for(tmp_path, env={"HF_TOKEN": "secret-of-plan"})
    output = JobOutput(plan, console, environ={"DB_PASSWORD": "secret-of-env"})
    output.note("agent: secret-of-plan, secret-of-env, secret-of-host, nonce-of-this-job")
    output.event("host_lost", host="a", reason="said secret-of-env")
    output.take(out(0, "secret-of-plan\n"))
    output.close()
    assert console.notes == ["agent: ***, ***, ***, ***"]
    assert console.texts(0) == ["secret-of-plan"]
    assert "secret-of" not in (tmp_path / "events.jsonl").read_text()
    assert (tmp_path / "rank0.log").read_text() == "secret-of-plan\n"


def test_events_are_lines_in_order_of_time(tmp_path: Path) -> None:
    output = JobOutput(plan_for(tmp_path), RecordingSink())
    output.event("start", attempt=0)
    output.event("rank_started", rank=0, host="a", pid=7)
    output.note("hm")
    output.event("end", outcome="done", exit_code=0)
    output.close()
    output.event("late")
    events = events_in(tmp_path)
    assert [event["event"] for event in events] == ["start", "rank_started", "note", "end"]
    assert events == sorted(events, key=lambda event: str(event["time"]))


def test_pulses_show_in_live_json_with_host_and_pid_until_the_rank_ends(tmp_path: Path) -> None:
    output = JobOutput(plan_for(tmp_path), RecordingSink())
    output.event("rank_started", rank=1, host="b", pid=77)
    assert output.tick(0.0) is None
    output.pulse([pulse(1, step=3)])
    assert output.tick(10.0) is None
    live = read_live(tmp_path)
    assert live is not None
    assert [(rank.rank, rank.host, rank.pid, rank.step) for rank in live.ranks] == [(1, "b", 77, 3)]
    output.pulse([pulse(1, step=4)])
    assert output.tick(10.5) == 11.0
    output.event("rank_exit", rank=1, host="b", status=0)
    output.close()
    live = read_live(tmp_path)
    assert live is not None
    assert live.ranks == ()


def test_the_display_says_when_it_wants_to_be_called_again(tmp_path: Path) -> None:
    class Display:
        shows_bars = True

        def bar(self, rank: int, stream: str, state: str | None) -> None:
            pass

        def tick(self, now_s: float) -> float | None:
            return now_s + 0.1

        def close(self) -> None:
            pass

    output = JobOutput(plan_for(tmp_path), RecordingSink(), display=Display())
    assert output.tick(5.0) == 5.1
    output.close()


def a_piece(offset: int, data: bytes, *, is_last: bool = False) -> RankTraceBytes:
    return RankTraceBytes(rank=1, offset=offset, data=base64.b64encode(data).decode(), is_last=is_last)


def test_a_profile_from_a_host_apart_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    output = JobOutput(plan_for(tmp_path), RecordingSink())
    path = JobPaths(tmp_path).trace(1)
    # The attempt before ended in the middle of it.
    output.rank_trace(a_piece(0, b"half"))
    output.rank_trace(a_piece(0, b"the "))
    assert not path.exists()
    output.rank_trace(a_piece(4, b"whole", is_last=True))
    output.close()
    assert path.read_bytes() == b"the whole"
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_left_of_a_profile_that_was_not_kept_is_not_taken_for_it(tmp_path: Path) -> None:
    sink = RecordingSink()
    output = JobOutput(plan_for(tmp_path), sink)
    (draft,) = JobPaths(tmp_path).trace_drafts(1)[1:]
    draft.symlink_to(tmp_path / "elsewhere")
    output.rank_trace(a_piece(4, b"whole", is_last=True))
    output.close()
    assert not JobPaths(tmp_path).trace(1).exists()
    assert not (tmp_path / "elsewhere").exists()
