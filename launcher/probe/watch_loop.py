"""Takes samples of hosts again and again, and shows what happened between two. How it is shown is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from dsrun.errors import LaunchError

from ..survey.client import HostAnswer, Survey
from .watch import Load, Sample, load_between

#: Before the first view, which needs two samples: nobody looks at an empty screen for an interval.
_FIRST_S = 0.3
#: Beside the interval: for a sample of a host under load.
_PATIENCE_S = 10.0

#: By host: a sample, or why there is none.
Taken = Mapping[str, Sample | str]


def take_samples(survey: Survey) -> dict[str, Sample | str]:
    """Takes one sample of every host; hosts that were lost say so from then on."""
    answers = survey.ask("watch", {}, patience_s=_PATIENCE_S)
    return {
        name: Sample.from_json(answer.value) if isinstance(answer, HostAnswer) else answer.reason
        for name, answer in answers.items()
    }


def watch(
    take: Callable[[], Taken],
    show: Callable[[Mapping[str, Load | str]], None],
    *,
    interval_s: float,
    wait: Callable[[float], None],
) -> None:
    """Shows what hosts do until Ctrl-C.

    Args:
        take: function that takes a sample of every host.
        show: callback that gets, by host name, what the host did since the sample before, or why that is not known.
        interval_s: seconds between two samples.
        wait: function that waits the given number of seconds.

    Raises:
        LaunchError: no host answers any more.
    """
    with suppress(KeyboardInterrupt):
        before, pause_s = take(), min(_FIRST_S, interval_s)
        while True:
            wait(pause_s)
            after, pause_s = take(), interval_s
            loads: dict[str, Load | str] = {}
            for name, now in after.items():
                then = before[name]
                loads[name] = now if isinstance(now, str) else load_between(now if isinstance(then, str) else then, now)
            show(loads)
            if all(isinstance(load, str) for load in loads.values()):
                raise LaunchError("no host answers any more", hint="`dsrun doctor -H HOSTS` says why")
            before = after
