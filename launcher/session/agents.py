"""The front end's side of one attempt at a job: starts an agent on every host, merges what they send, stops them.

Prints nothing: output and news go to a `Sink`. Starts no rank and signals none: agents do. Everything is decided on
the caller's thread, in the order of one queue, and nothing there waits for a single host.

Requests of the user overtake all output that waits to be shown, and are acted on while the reader of the output does
not read. What is made of what hosts say stands in `attempt`, how ranks are stopped in `shutdown`.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

from dsrun.contract.environment import CONFIG_ENV, DEFAULT_HANG_TIMEOUT_S, GROUP_TIMEOUT_ENV, group_timeout_after

from ..agent.job_files import marked
from ..agent.leftovers import sweep_command
from ..failures.hang import HangPolicy
from ..hosts.spec import HostSpec
from ..isolated_command import isolated_command
from ..plan.launch_plan import LaunchPlan
from ..process_modules import AGENT
from ..transport.base import FIRST_WORD_PATIENCE_S, Channel, Transport
from .agent_link import ChannelEnd, ChannelOpening, Link, LinkEvent, MessageReceived, Said, start_frame
from .attempt import Attempt
from .keepalive import Keepalive
from .rank_table import Outcome
from .remote_leftovers import sweep_hosts
from .sink import Sink
from .user_requests import Remark, SignalRequest, StopRequest, UserRequests

#: For all agents together to exit once nothing is expected of them.
_CLOSE_PATIENCE_S = 5.0
#: Hosts between the first knock and the agent's first word: jump hosts refuse more connections than a few dozen.
_OPEN_AT_ONCE = 64
#: Events that may wait to be handled, of one host and of all.
_ROOM_OF_ONE, _ROOM_OF_ALL = 64, 2048
#: Between two looks at which hosts are late or silent.
_LOOK_S = 1.0


class _Wake:
    """Ends the wait for an event, so that a request is looked at."""


class Session:
    """One attempt, from its plan to its outcome.

    Args:
        plan: the launch; its run_dir must exist here.
        transport: way to reach the hosts.
        sink: receiver of output and news.
        python: the interpreter for agents and ranks on hosts that name none; dsrun must be importable there.
        requests: requests of the user about the job, read by this session from now on; None makes a queue of its own.
        hang: policy for an attempt without progress; None means the default policy.
        first_word_s: longest time from starting an agent to its first word.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        transport: Transport,
        sink: Sink,
        *,
        python: str,
        requests: UserRequests | None = None,
        hang: HangPolicy | None = None,
        first_word_s: float = FIRST_WORD_PATIENCE_S,
    ) -> None:
        self.plan = plan
        self._transport = transport
        self._sink = sink
        self._python = python
        self._first_word_s = first_word_s
        # SimpleQueue, because its put may run in a signal handler that interrupted its get.
        self._events: queue.SimpleQueue[LinkEvent | _Wake] = queue.SimpleQueue()
        room = max(4, min(_ROOM_OF_ONE, _ROOM_OF_ALL // len(plan.nodes)))
        self._links = [Link(node, self._events.put, room=room, lease_s=plan.lease_s) for node in plan.nodes]
        self._keepalive = Keepalive(self._links, lease_s=plan.lease_s)
        self._hang = hang or HangPolicy()
        self._attempt = Attempt(plan, self._links, sink, self._hang)
        self._look_at_s = 0.0
        #: What the user wants of the job.
        self.requests = requests or UserRequests()
        self.requests.read_by(self)

    @property
    def first_host_is_apart(self) -> bool | None:
        """See `Attempt`."""
        return self._attempt.first_host_is_apart

    def wake(self) -> None:
        """See `RequestReader`."""
        self._events.put(_Wake())

    def handle_requests(self) -> bool:
        """See `RequestReader`; on the session's thread."""
        while (request := self.requests.take()) is not None:
            match request:
                case StopRequest():
                    if not request.at_once and self._attempt.interrupt(request.stop):
                        self.requests.interrupts_given += 1
                    else:
                        self._attempt.shutdown.on_request(request)
                case SignalRequest(signum):
                    self._attempt.pass_on(signum)
                case Remark(text):
                    self._sink.note(text)
        return not self._attempt.shutdown.is_left

    def run(self) -> Outcome:
        """Runs the attempt to its end, whatever the end is.

        Returns:
            the outcome; failures of ranks and hosts are part of it.
        """
        plan = self.plan
        hosts = [link.node.host.name for link in self._links]
        self._sink.event("start", attempt=plan.attempt, world_size=plan.world_size, hosts=hosts, resume=plan.resume)
        with marked(plan.run_dir) as mark:
            try:
                self._open(mark)
                while self.handle_requests() and self._attempt.expected:
                    self._wait_and_handle()
            finally:
                self._close()
                self._sweep()
                self._attempt.table.end_outputs(self._sink.ended)
        return self._attempt.table.outcome(tail=self._sink.tail, log=self._sink.log)

    def _open(self, mark: str) -> None:
        gate = threading.Semaphore(_OPEN_AT_ONCE)
        plan = _with_group_timeout(self.plan, self._hang)
        frame = start_frame(plan, mark=mark, config=_config_of(plan))
        for link in self._links:
            link.open(lambda link=link: self._connect(link), frame(link.node.node_rank), gate)
        self._keepalive.start()

    def _connect(self, link: Link) -> Channel:
        host = link.node.host
        argv = isolated_command(host.python or self._python, AGENT, self.plan.job_id)
        return self._transport.start(host, argv)

    def _close(self) -> None:
        self._keepalive.stop()
        for link in self._links:
            link.end_input()
        if not self._attempt.shutdown.is_left:
            until_s = time.monotonic() + _CLOSE_PATIENCE_S
            for link in self._links:
                link.close(until_s)

    def _sweep(self) -> None:
        """Ends what lost agents left behind, so that nothing of this attempt meets the next."""
        if not self._attempt.abandoned or self._attempt.shutdown.is_left:
            return

        def command(host: HostSpec) -> list[str]:
            return sweep_command(host.python or self._python, self.plan.job_id, self.plan.nonce)

        lost = [link.node.host for link in self._attempt.abandoned]
        out_of_touch = [link.node.host.name for link in self._attempt.abandoned if link.is_out_of_touch]
        for swept in sweep_hosts(lost, command, self._transport, out_of_touch=out_of_touch):
            if swept.ended:
                self._sink.note(f"{swept.host}: ended what its lost agent left behind: {', '.join(swept.ended)}")
            if swept.left:
                self._attempt.tell_unkillable(swept.host, swept.left)

    # --- events

    def _wait_and_handle(self) -> None:
        now_s = time.monotonic()
        sink_at_s = self._sink.tick(now_s)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._attempt.look(now_s, up_to_date=self._events.empty())
        until_s = self._look_at_s if sink_at_s is None else min(self._look_at_s, sink_at_s)
        try:
            event = self._events.get(timeout=max(0.0, until_s - now_s))
        except queue.Empty:
            return
        match event:
            case ChannelOpening(link):
                link.deadline_s = time.monotonic() + self._first_word_s
            case MessageReceived(link, message):
                link.handled()
                if not link.over:
                    self._attempt.on_message(link, message)
            case Said(link, line):
                link.handled()
                self._sink.note(f"{link.node.host.name}: {line}")
            case ChannelEnd():
                self._attempt.on_ended(event)
            case _Wake():
                pass


def _with_group_timeout(plan: LaunchPlan, hang: HangPolicy) -> LaunchPlan:
    """Tells ranks how long to wait for each other; see [Note: who speaks first] in `dsrun.contract.environment`."""
    hang_timeout_s = DEFAULT_HANG_TIMEOUT_S if hang.timeout_s is None else hang.timeout_s
    return replace(plan, env={**plan.env, GROUP_TIMEOUT_ENV: f"{group_timeout_after(hang_timeout_s):g}"})


def _config_of(plan: LaunchPlan) -> str | None:
    path = plan.env.get(CONFIG_ENV)
    try:
        return None if path is None else Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        # It was there when it was checked. Now whoever reads it says that it is gone, as on one host.
        return None
