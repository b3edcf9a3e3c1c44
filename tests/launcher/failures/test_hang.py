from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.contract.environment import DEFAULT_HANG_TIMEOUT_S
from dsrun.launcher.failures.hang import (
    HangPolicy,
    HangTracker,
    StackRound,
    WatchdogEnd,
    WatchdogWords,
    start_words,
    watchdog_warning,
)
from dsrun.launcher.protocol import RankStack, RankStatus, Starting
from support.cli import invoke


def pulse(rank: int, *, beats: int = 0, idle_s: float | None = None, starting: Starting = "") -> RankStatus:
    return RankStatus(
        rank=rank,
        beats=beats,
        step=None,
        idle_s=idle_s,
        waited_s=0.0,
        phase="",
        collective="",
        cpu_percent=0.0,
        rss_bytes=0,
        starting=starting,
    )


def looks(tracker: HangTracker, seconds: range) -> list[float | None]:
    return [tracker.look(float(second)) for second in seconds]


def test_a_rank_that_beats_hangs_once_its_last_beat_is_too_old_and_is_told_once() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0, 1])
    tracker.pulse([pulse(0, beats=5, idle_s=1), pulse(1, beats=5, idle_s=9.9)])
    assert tracker.look(1) is None
    tracker.pulse([pulse(0, beats=6, idle_s=1), pulse(1, beats=5, idle_s=10.9)])
    assert tracker.look(2) == 10.9
    tracker.pulse([pulse(1, beats=5, idle_s=11.9)])
    assert tracker.look(3) is None


def test_a_hang_that_moved_on_and_came_back_is_told_again() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0])
    told: list[bool] = []
    for beats, idle_s in ((1, 11.0), (1, 12.0), (2, 0.5), (2, 11.0)):
        tracker.pulse([pulse(0, beats=beats, idle_s=idle_s)])
        told.append(tracker.look(1) is not None)
    assert told == [True, False, False, True]


def test_without_a_time_the_default_judges_ranks_that_beat_and_no_others() -> None:
    silent = HangTracker(None, now_s=0)
    silent.started([0, 1])
    assert not any(looks(silent, range(4 * int(DEFAULT_HANG_TIMEOUT_S))))
    beating = HangTracker(None, now_s=0)
    beating.started([0])
    beating.pulse([pulse(0, beats=1, idle_s=DEFAULT_HANG_TIMEOUT_S - 1)])
    assert beating.look(1) is None
    beating.pulse([pulse(0, beats=1, idle_s=DEFAULT_HANG_TIMEOUT_S)])
    assert beating.look(2) == DEFAULT_HANG_TIMEOUT_S


def test_ranks_that_never_beat_hang_when_nobody_prints() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0, 1])
    assert not any(looks(tracker, range(10)))
    tracker.printed(0)
    assert not any(looks(tracker, range(10, 20)))
    assert [silent_s for silent_s in looks(tracker, range(20, 40)) if silent_s] == [10]


def test_a_rank_that_prints_nothing_is_well_as_long_as_another_beats() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0, 1])
    for second in range(60):
        tracker.pulse([pulse(0, beats=second, idle_s=0.1), pulse(1)])
        assert tracker.look(float(second)) is None


@pytest.mark.parametrize("beats", [True, False])
def test_a_rank_that_has_ended_does_not_hang(beats: bool) -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0])
    tracker.pulse([pulse(0, beats=1, idle_s=1.0)] if beats else [])
    tracker.ended(0)
    assert not any(looks(tracker, range(100)))


@pytest.mark.parametrize("starting", ["torch", "interpreter"])
def test_nobody_hangs_while_a_rank_starts_and_then_all_have_the_whole_time(starting: Starting) -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0, 1])
    for second in range(1, 100):
        # Rank 0 has beaten, and waits for the other one.
        tracker.pulse([pulse(0, beats=1, idle_s=float(second)), pulse(1, starting=starting)])
        assert tracker.look(float(second)) is None
    tracker.pulse([pulse(0, beats=1, idle_s=108.0), pulse(1)])
    assert tracker.look(108) is None
    tracker.pulse([pulse(0, beats=1, idle_s=110.0), pulse(1)])
    assert tracker.look(110) is not None
    assert not tracker.late


def test_a_silent_rank_has_the_whole_time_once_torch_is_imported() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0])
    tracker.pulse([pulse(0, starting="torch")])
    assert not any(looks(tracker, range(1, 60)))
    tracker.pulse([pulse(0)])
    assert looks(tracker, range(60, 73)).index(10) == 10


def test_ranks_that_do_not_start_within_the_limit_are_told_once() -> None:
    tracker = HangTracker(10, now_s=0, start_limit_s=600)
    tracker.pulse([], importing=[0, 1])
    told = [(second, silent_s) for second, silent_s in enumerate(looks(tracker, range(700))) if silent_s]
    assert told == [(601, 600)]
    assert start_words(tracker.late, 600) == "ranks 0, 1 are still importing torch after 10m 0s"
    tracker.pulse([pulse(0), pulse(1)])
    assert (tracker.look(701), dict(tracker.late)) == (None, {})


def test_a_rank_that_prints_has_started_though_it_does_not_tell() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0])
    tracker.printed(0)
    tracker.pulse([pulse(0, starting="interpreter")])
    assert any(looks(tracker, range(15)))


def test_a_rank_that_ends_while_it_starts_keeps_nobody_from_being_judged() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0, 1])
    tracker.pulse([pulse(0), pulse(1, starting="torch")])
    tracker.ended(1)
    assert any(looks(tracker, range(15)))


@pytest.mark.parametrize(
    ("policy", "limit_s"),
    [
        (HangPolicy(), 1800),
        (HangPolicy(timeout_s=30), 600),
        (HangPolicy(timeout_s=3600), 3600),
        (HangPolicy(timeout_s=30, start_timeout_s=1200), 1200),
    ],
)
def test_ranks_may_take_ten_minutes_to_start_or_longer_where_a_longer_time_was_named(
    policy: HangPolicy, limit_s: float
) -> None:
    assert policy.start_limit_s == limit_s


def test_a_front_end_that_was_away_does_not_take_its_own_absence_for_a_hang() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0])
    assert tracker.look(1) is None
    assert tracker.look(1000) is None


def stack(rank: int) -> RankStack:
    return RankStack(rank=rank, state="S", kernel="", text="", phase="", collective="", step=None, idle_s=None)


def test_a_round_is_over_when_all_hosts_have_answered_or_are_gone() -> None:
    asked = StackRound(["a", "b"], silent_s=10, now_s=0)
    asked.answered("a", [stack(0)])
    assert not asked.is_over(1)
    asked.gone("b")
    assert asked.is_over(1)
    assert [(host, entry.rank) for host, entry in asked.stacks] == [("a", 0)]


def test_a_host_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    asked = StackRound(["a", "b"], silent_s=10, now_s=0)
    asked.answered("a", [stack(0)])
    assert not asked.is_over(41)
    assert asked.is_over(45)
    assert asked.waiting == {"b"}


def test_while_a_rank_waits_for_a_person_nobody_hangs_and_then_all_have_the_whole_time() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0, 1, 2])
    tracker.pulse([pulse(0, beats=1, idle_s=5), pulse(1, beats=1, idle_s=5)])
    tracker.waits_for_person(0)
    for second in range(1, 100):
        tracker.pulse([pulse(0, beats=1, idle_s=5 + second), pulse(1, beats=1, idle_s=5 + second)])
        assert tracker.look(float(second)) is None
    tracker.goes_on(0, 100)
    tracker.pulse([pulse(1, beats=1, idle_s=109)])
    assert tracker.look(109) is None
    tracker.pulse([pulse(1, beats=1, idle_s=110)])
    assert tracker.look(110) == 10


def test_a_rank_that_never_beat_has_the_whole_time_after_it_waited_for_a_person() -> None:
    tracker = HangTracker(10, now_s=0)
    tracker.started([0])
    tracker.waits_for_person(0)
    assert not any(looks(tracker, range(1, 50)))
    tracker.goes_on(0, 50)
    assert looks(tracker, range(50, 63)) == [*([None] * 10), 10, None, None]


#: As torch 2.13 writes it, in one line.
CAUGHT = (
    "[rank2]:[E1122 10:00:00.000000000 ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=57, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600014 "
    "milliseconds before timing out.\n"
)
STUCK = "[Rank 2] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitored enqueued\n"


#: What comes before, with some seconds for dumps.
SILENT = "[Rank 2] Heartbeat monitor timed out! Process will be terminated after dumping debug info. size()=103\n"


@pytest.mark.parametrize(("line", "waited_s"), [(CAUGHT, 600.014), (STUCK, 480.0), (SILENT, 600.0)])
def test_what_torch_prints_before_it_ends_a_rank_is_heard(line: str, waited_s: float) -> None:
    assert WatchdogWords().look(2, f"loss 0.5\n{line}frame #0: c10d\n") == WatchdogEnd(2, waited_s)


@pytest.mark.parametrize("cut", [10, 100, 140, len(CAUGHT) - 2])
def test_it_is_heard_once_its_words_are_complete_wherever_they_are_cut(cut: int) -> None:
    words = WatchdogWords()
    first, second = words.look(2, CAUGHT[:cut]), words.look(2, CAUGHT[cut:])
    found = first or second
    assert found is not None
    assert found.rank == 2
    assert WatchdogWords().look(1, CAUGHT[cut:]) is None or cut < 100


def test_other_output_is_nothing_to_ask_for_and_kept_in_bounds() -> None:
    words = WatchdogWords()
    assert words.look(0, "Watchdog thread started\n") is None
    assert words.look(0, "x" * 1_000_000) is None
    assert words.look(1, "operation timeout: WorkNCCL") is None, "of another rank"


PLAIN = b"import torch.distributed as dist\ndist.init_process_group('nccl')\n"


def test_a_time_above_nccls_own_is_told_where_the_script_makes_its_groups_plainly() -> None:
    (told,) = watchdog_warning(1800, PLAIN, name="train.py")
    assert told.startswith("warning: `--hang-timeout 30m 0s`: the groups of train.py wait 10 minutes under NCCL")


@pytest.mark.parametrize(
    ("timeout_s", "script"),
    [
        (None, PLAIN),
        (300, PLAIN),
        (1800, PLAIN.replace(b"'nccl'", b"'nccl', timeout=timedelta(hours=1)")),
        (1800, PLAIN.replace(b"nccl", b"gloo")),
        (1800, PLAIN + b"import dsrun\n"),
        (1800, b"import dsrun\n"),
        (1800, b"print('no groups')\n"),
    ],
)
def test_nothing_is_said_where_dsrun_speaks_first_or_may(timeout_s: float | None, script: bytes) -> None:
    assert watchdog_warning(timeout_s, script, name="train.py") == ()


@pytest.mark.parametrize(("more", "is_told"), [([], True), (["--backend", "gloo"], False), (["--no-gpu"], False)])
def test_the_start_says_it(tmp_path: Path, more: list[str], is_told: bool) -> None:
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_bytes(PLAIN)
    hosts.write_text("w0 slots=2\nw1 slots=2\n")
    result = invoke("run", "--dry-run", "-H", str(hosts), "--hang-timeout", "30m", *more, str(script))
    assert result.exit_code == 0, result.stderr
    assert ("the groups of train.py wait 10 minutes under NCCL" in result.stderr) == is_told
