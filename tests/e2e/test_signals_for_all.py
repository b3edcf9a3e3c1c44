"""A scheduler signals every process of a job at once: agent, spawner and ranks. What that means is up to the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dsrun.launcher.plan.launch_plan import StartMethod
from support.jobs import RecordingSink, local_session, script_plan
from support.processes import job_processes

pytestmark = pytest.mark.timeout(60)

#: Says that it is ready, and what signal came; ends when it has said so, in its own time.
CATCH = """
import os, signal, sys, threading
came, note = os.pipe()  # an Event would be set by a handler that may have interrupted its own wait, lock in hand
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, lambda signum, frame: os.write(note, bytes([signum])))
sys.stdout.write("ready\\n")
first = os.read(came, 1)[0]
threading.Event().wait(0.3)
sys.stdout.write(f"saved after {signal.Signals(first).name}\\n")
"""


@pytest.mark.depends_on_speed("the time-out of the test")
@pytest.mark.parametrize(
    "start", ["fork", pytest.param("exec", marks=pytest.mark.soak("the other start, which has a spawner besides"))]
)
@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_signal_to_all_processes_of_a_job_leaves_its_ranks_their_time(
    tmp_path: Path, signum: signal.Signals, start: StartMethod
) -> None:
    plan = script_plan(tmp_path, CATCH, start=start)
    ready: set[int] = set()

    def signal_all(rank: int, text: str) -> None:
        if text == "ready":
            ready.add(rank)
            if len(ready) == 2:
                for pid in job_processes(plan.job_id):
                    os.kill(pid, signum)

    sink = RecordingSink(signal_all)
    with local_session(plan, sink) as session:
        outcome = session.run()
    assert outcome.exit_code == 0, (outcome, sink.notes)
    assert [sink.texts(rank)[1:] for rank in range(2)] == [[f"saved after {signum.name}"]] * 2


#: Rank 0 has no handler.
ONE_CATCHES = """
import os, sys, threading
if os.environ["RANK"] == "0":
    sys.stdout.write(f"pid {os.getpid()}\\n")
    threading.Event().wait()
"""


class OnNote(RecordingSink):
    """Acts on a note with a certain text, on the session's thread."""

    def __init__(self, on_line: Callable[[int, str], None], text: str, act: Callable[[], None]) -> None:
        super().__init__(on_line)
        self._text = text
        self._act = act

    def note(self, text: str) -> None:
        super().note(text)
        if self._text in text:
            self._act()


def test_a_rank_that_dies_of_a_stop_before_the_front_end_hears_of_it_costs_the_others_no_grace(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, ONE_CATCHES + CATCH)
    said: dict[int, str] = {}

    def kill_one(rank: int, text: str) -> None:
        said[rank] = text
        if len(said) == 2 and said[1] == "ready":
            os.kill(int(said[0].split()[1]), signal.SIGTERM)

    sink = OnNote(kill_one, "was killed by SIGTERM; stopping", lambda: session.requests.request_stop(signal.SIGTERM))
    with local_session(plan, sink) as session:
        outcome = session.run()
    assert (outcome.exit_code, outcome.report) == (143, None)
    assert sink.texts(1) == ["ready", "saved after SIGTERM"]
