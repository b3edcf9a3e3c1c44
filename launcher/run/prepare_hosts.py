"""What happens on all hosts of a job before it has a rank: they are reached, brought the files, and compared, and
find where their ranks can meet.

Puts the steps in order; each is known by its own module. Starts no rank. A launch on this machine alone needs none of
it, and does not import this.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.environment import BACKEND_ENV
from dsrun.errors import PreflightError, Problem

from ..hosts.spec import HostSpec
from ..launch.host_placement import Placement
from ..plan.launch_plan import GpuPlace, LaunchPlan
from ..preflight.findings import AnsweredHost, Preflight, Requirements, named
from ..preflight.run import check_hosts
from ..preflight.text import summary
from ..rendezvous.address import choose_meeting
from ..survey.client import Survey
from ..sync.hosts import sync_hosts, synced_lines
from ..transport.base import OwnedTransport
from ..transport.choice import ReachSettings, make_transport


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """What the user said about hosts beside which they are.

    Attributes:
        ssh_config: ssh_config to read in place of the user's and the system's; None reads those.
        connect_timeout_s: longest wait for a server; None means the transport's own.
        start_timeout_s: longest wait in seconds for dsrun to start on a host once its server is there; None means the
            transport's own.
        accept_new_host_keys: trust hosts whose key nobody knows, and say so.
        iface: interfaces of the first host to meet at; None takes the fastest that all reach.
        preflight: compare the hosts before anything starts.
        copied_folder: folder of this machine; the working folder of every host is made to hold the same first. None
            copies nothing.
    """

    ssh_config: Path | None = None
    connect_timeout_s: float | None = None
    start_timeout_s: float | None = None
    accept_new_host_keys: bool = False
    iface: str | None = None
    preflight: bool = True
    copied_folder: str | None = None


class HostPreparation:
    """The hosts of one job that are not all this machine.

    Args:
        placement: hosts that the ranks go to, and the way to them.
        settings: settings of the user for other hosts.
        lease_s: longest silence of a host.
        stdin_fd: dsrun's own stdin, for the agent of this machine.
        note: callback that gets a line about each wait, and about each host key that was accepted as new; runs on the
            caller's thread.
        warn: callback that gets each warning about the hosts, for example a difference between them; a warning stops
            nothing.
        check: callback that runs now and then on the caller's thread; an exception that it raises ends the
            preparations.
    """

    def __init__(
        self,
        placement: Placement,
        settings: HostSettings,
        *,
        lease_s: float,
        stdin_fd: int | None = None,
        note: Callable[[str], None],
        warn: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._placement = placement
        self._settings = settings
        self._note = note
        self._warn = warn
        self._check_requests = check
        #: Filled by the threads that connect; none of them may speak while another does.
        self._said: deque[str] = deque()
        reach = ReachSettings(
            lease_s=lease_s,
            connect_timeout_s=settings.connect_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            ssh_config=settings.ssh_config,
            announce=self._said.append if settings.accept_new_host_keys else None,
            note=self._said.append,
            stdin_fd=stdin_fd,
        )
        self._first_word_s = reach.first_word_s
        #: The way to them, also for the job.
        self.transport: OwnedTransport = make_transport(placement.transport, reach, local_hosts=placement.local_hosts)

    def prepare(self, plan: LaunchPlan, *, python: str) -> LaunchPlan:
        """Reaches all hosts, and finds out what the launch must know of them.

        Args:
            plan: the launch.
            python: the interpreter on hosts that name none.

        Returns:
            the plan, with the address where ranks meet, each host's interface to it, and where its GPUs are.

        Raises:
            PreflightError: hosts cannot be reached, or not each other, or are not fit; names all of them.
        """
        hosts = [node.host for node in plan.nodes]
        self._note(f"reaching {len(hosts)} hosts" if len(hosts) > 1 else f"reaching {hosts[0].name}")
        with Survey(
            hosts, self.transport, python=python, first_word_s=self._first_word_s, meanwhile=self._attend
        ) as survey:
            if self._settings.copied_folder is not None:
                _refuse_unreached(survey)
                self._copy(survey, self._settings.copied_folder, plan.cwd)
            if self._settings.preflight:
                found = self._check(survey, hosts, plan)
                meeting, plan = found.meeting, plan.with_gpus(gpu_places(found))
                assert meeting is not None, "hosts that do not meet are refused"
            else:
                _refuse_unreached(survey)
                meeting = choose_meeting(survey, hosts, iface=self._settings.iface, env=plan.env)
        if (chosen := meeting.text()) is not None:
            self._note(chosen)
        # They fill in what nobody has set. See [Note: variables] of plan.
        return plan.at(meeting.address, meeting.variables())

    def _attend(self) -> None:
        """Does what else there is to do while hosts are waited for."""
        self._check_requests()
        while self._said:
            self._note(self._said.popleft())

    def _copy(self, survey: Survey, folder: str, target: str) -> None:
        """Makes every host's working folder hold what the folder here holds."""
        is_same = os.path.realpath(folder) == os.path.realpath(target)
        hosts = self._placement.remote_hosts if is_same else self._placement.allocation.hosts
        synced = sync_hosts(survey, hosts, folder=folder, target=target, rsync_by=self.transport, note=self._note)
        for line in synced_lines(synced):
            self._note(line)
        if synced.problems:
            raise PreflightError.of(synced.problems)

    def _check(self, survey: Survey, hosts: Sequence[HostSpec], plan: LaunchPlan) -> Preflight:
        """Compares the hosts, and refuses those that the job would fail on."""
        wants = wants_of(plan, iface=self._settings.iface)
        found = check_hosts(survey, hosts, wants)
        idle = None if wants.on_gpus is False else idle_gpus_warning(self._placement, found)
        for warning in (*found.warnings(), *filter(None, [idle])):
            self._warn(f"warning: {warning}")
        if found.is_red:
            raise found.error()
        self._note(summary(found))
        return found


def gpu_places(found: Preflight) -> dict[str, tuple[GpuPlace, ...]]:
    """Returns what drivers told of the GPUs of hosts, by name of the host.

    Args:
        found: answers of the hosts to the preflight questions.
    """
    answered = {name: its.facts for name, its in found.seen.items() if isinstance(its, AnsweredHost)}
    return {name: facts.gpu_places for name, facts in answered.items() if facts.gpu_places}


def idle_gpus_warning(placement: Placement, found: Preflight) -> str | None:
    """Says which GPUs no rank takes because a scheduler has not told of them; None where there are none.

    `salloc --gres=gpu:8` sets no variable that says so, and a cluster may have no GPUs in its configuration at all.

    Args:
        placement: hosts and slots that the ranks go to.
        found: answers of the hosts to the preflight questions.
    """
    hosts = placement.allocation.hosts
    counts = {name: len(its.facts.gpus) for name, its in found.seen.items() if isinstance(its, AnsweredHost)}
    idle = {host.name: counts[host.name] for host in hosts if counts.get(host.name, 0) > host.slots}
    if not idle or not placement.slots_from_scheduler:
        return None
    least, most = min(idle.values()), max(idle.values())
    there, takes = (f"{most}", "takes them all") if least == most else (f"{least} to {most}", f"takes {least} of each")
    return (
        f"{placement.source} does not say here how many GPUs a host has: {named(list(idle), len(hosts))} "
        f"{'has' if len(idle) == 1 else 'have'} {there} GPUs, and fewer ranks; `dsrun -n {least}` {takes}"
    )


def wants_of(plan: LaunchPlan, *, iface: str | None) -> Requirements:
    """Returns what a job needs of its hosts.

    Args:
        plan: the launch.
        iface: name of the network interface as the user gave it to `--iface`; None where it was not given.
    """
    program = plan.program
    backend = plan.env.get(BACKEND_ENV)
    return Requirements(
        folder=plan.cwd,
        script=program.target if program.kind == "script" else None,
        is_python=program.kind != "command",
        on_gpus=None if backend is None else backend == "nccl",
        iface=iface,
        nccl={name: value for name, value in plan.env.items() if name.startswith("NCCL_")},
    )


def _refuse_unreached(survey: Survey) -> None:
    unreached = survey.unreached()
    if unreached:
        raise PreflightError.of(
            [Problem(f"host {name}: {unable.reason}", unable.hint) for name, unable in unreached.items()]
        )
