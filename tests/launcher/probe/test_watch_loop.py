"""The view goes on until Ctrl-C; hosts that are lost stay named, and the last one ends it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.probe.watch import Load, Sample
from dsrun.launcher.probe.watch_loop import Taken, take_samples, watch
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.transport.local import LocalTransport


def at(at_s: float, busy: int) -> Sample:
    return Sample(
        at_s=at_s,
        cores=1,
        busy_ticks=busy,
        all_ticks=int(at_s * 100),
        memory_used_bytes=1,
        memory_total_bytes=2,
        network={},
        disk={},
        gpus=(),
    )


class _Clock:
    """Ends the view as Ctrl-C does, after so many waits."""

    def __init__(self, count: int) -> None:
        self.waited: list[float] = []
        self._count = count

    def wait(self, seconds: float) -> None:
        if len(self.waited) == self._count:
            raise KeyboardInterrupt
        self.waited.append(seconds)


def seen_of(samples: list[Taken], *, waits: int) -> tuple[list[Mapping[str, Load | str]], list[float]]:
    shown: list[Mapping[str, Load | str]] = []
    clock, left = _Clock(waits), iter(samples)
    watch(lambda: next(left), shown.append, interval_s=2.0, wait=clock.wait)
    return shown, clock.waited


def test_the_first_view_comes_soon_and_the_others_at_the_interval() -> None:
    shown, waited = seen_of([{"n1": at(1, 0)}, {"n1": at(2, 50)}, {"n1": at(4, 150)}], waits=2)
    assert waited == [0.3, 2.0]
    loads = [view["n1"] for view in shown]
    assert [load.cpu_percent for load in loads if isinstance(load, Load)] == [50.0, 50.0]


def test_a_host_that_is_lost_says_why_and_one_that_comes_back_starts_anew() -> None:
    one = at(1, 0)
    samples: list[Taken] = [
        {"n1": one, "n2": one},
        {"n1": at(2, 100), "n2": "the connection was lost"},
        {"n1": at(3, 200), "n2": at(3, 300)},
    ]
    shown, _ = seen_of(samples, waits=2)
    assert shown[0]["n2"] == "the connection was lost"
    back = shown[1]["n2"]
    assert isinstance(back, Load)
    assert back.cpu_percent == 0.0


def test_when_no_host_answers_any_more_it_is_an_error() -> None:
    with pytest.raises(LaunchError, match="no host answers any more"):
        seen_of([{"n1": at(1, 0)}, {"n1": "lost"}], waits=9)


def test_samples_are_taken_of_all_hosts_over_one_survey() -> None:
    hosts = [HostSpec(name=name, slots=1, source="test") for name in ("n1", "n2")]
    hosts.append(HostSpec(name="bad", slots=1, source="test", python="/no/python"))
    with Survey(hosts, LocalTransport(), python=sys.executable) as survey:
        first, second = take_samples(survey), take_samples(survey)
    assert list(first) == ["n1", "n2", "bad"]
    for name in ("n1", "n2"):
        before, after = first[name], second[name]
        assert isinstance(before, Sample)
        assert isinstance(after, Sample)
        assert before.at_s < after.at_s
    assert "/no/python" in str(first["bad"])
