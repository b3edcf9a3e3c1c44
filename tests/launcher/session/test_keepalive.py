from __future__ import annotations

import threading

from dsrun.launcher.protocol import Lease, Message
from dsrun.launcher.session.keepalive import Keepalive


class Agent:
    """Counts leases, and says when it has several."""

    def __init__(self, *, over: bool = False, is_started: bool = True) -> None:
        self.over = over
        self.is_started = is_started
        self.leases = 0
        self.has_several = threading.Event()

    def send(self, message: Message) -> None:
        assert isinstance(message, Lease)
        self.leases += 1
        if self.leases == 3:
            self.has_several.set()


def test_agents_that_wait_get_leases_again_and_again_and_no_others_do() -> None:
    waiting, gone, on_its_way = Agent(), Agent(over=True), Agent(is_started=False)
    keepalive = Keepalive([waiting, gone, on_its_way], lease_s=0.1)
    keepalive.start()
    assert waiting.has_several.wait(10)
    keepalive.stop()
    sent = waiting.leases
    assert (gone.leases, on_its_way.leases) == (0, 0)
    assert waiting.leases == sent
