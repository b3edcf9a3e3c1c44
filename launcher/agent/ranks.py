"""The host's ranks as the agent sees them: started through the spawner, reported as they end, found while they live.

Sends news of them to the front end. Decides nothing about their end: the agent says who is signalled, and when.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from dsrun.contract.error_file import read_error_file
from dsrun.contract.heartbeats import Beat
from dsrun.contract.job_paths import JobPaths, stacks_pipe

from .. import processes
from ..machine.devices.by_rank import find_gpus, gpus_of_ranks, rank_variables, slice_note
from ..machine.processor.rank_binding import read_bindings
from ..plan.environment import THREADS_ENV
from ..plan.launch_plan import LaunchPlan, NodePlan
from ..protocol import Exit, Failed, GroupProgress, Message, Note, Started
from .relay import Relay
from .start.cgroup_scope import Scope, make_scope, remove_empty_scopes, scope_name
from .start.flight_recorder import RecorderFiles, pipe_environment, recorder_files, without_outer
from .start.spawner_pipe import SpawnerPipe, reason_of_end
from .start.worker import RankProcess, node_environment, worker_environment
from .watch.gpu_inquiry import GpuInquiry, is_of_a_gpu
from .watch.nccl_dumps import MOST_BYTES, DumpError, read_dump
from .watch.oom_kills import OomKills
from .watch.unfinished_failures import UnfinishedFailures


class HostRanks:
    """The ranks of one host, and the spawner that makes them.

    Args:
        plan: the launch.
        node_rank: rank of this host among the plan's hosts.
        own_folder: the plan's run folder is this host's own.
        selector: shared with the agent; every key's data is a function to call when the key is ready.
        relay: relay that carries news of the ranks to the front end.
        last_beat: function that returns what a local rank said last; None where it said nothing.
        on_lost: callback that gets the reason when ranks cannot be run any more.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        node_rank: int,
        *,
        own_folder: bool,
        selector: selectors.BaseSelector,
        relay: Relay,
        last_beat: Callable[[int], Beat | None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._node = plan.nodes[node_rank]
        self._own_folder = own_folder
        self._selector = selector
        self._relay = relay
        self._last_beat = last_beat
        self._on_lost = on_lost
        self._local_rank_of = {worker.rank: worker.local_rank for worker in self._node.workers}
        self._store: socket.socket | None = None
        self._spawner: SpawnerPipe | None = None
        self._rank_of: dict[int, int] = {}
        self._live: dict[int, RankProcess] = {}
        #: Of each rank, once ranks are started.
        self.recorders: dict[int, RecorderFiles] = {}
        self._ended: set[int] = set()
        #: A rank has ended otherwise than with 0.
        self.has_failed = False
        #: Ranks that ended below a dying spawner: pid -> status; unknown pids until it has told the ranks'.
        self._orphans: dict[int, int] = {}
        self._unfinished_failures = UnfinishedFailures(plan.run_dir, plan.grace_s)
        #: Ranks that failed by themselves, and were killed because they did not end of it.
        self._ended_for: set[int] = set()
        self._oom_kills = OomKills()
        self._inquiry = GpuInquiry({}, selector, relay.send)
        self._scope: Scope | None = None

    def open_store(self) -> tuple[str, int]:
        """Binds the rendezvous store's socket to a free port; it is held from here on.

        Returns:
            address and port.

        Raises:
            OSError: the plan's address is not this host's.
        """
        address = self._plan.master_addr
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._store = socket.create_server((address, 0), family=family, backlog=4096)
        return address, self._store.getsockname()[1]

    def take_store(self, listener: socket.socket) -> None:
        """Takes over a socket on which the rendezvous store is to be served."""
        self._store = listener

    def start(self, environ: Mapping[str, str], rendezvous: tuple[str, int], *, stdin_fd: int | None = None) -> None:
        """Starts the spawner, which starts the ranks.

        Args:
            environ: environment that the ranks inherit.
            rendezvous: address and port of the store.
            stdin_fd: descriptor that the plan's `stdin_rank` reads as its stdin, if that is a rank of this host; None
                for none.

        Raises:
            OSError: a pipe or the process cannot be made.
            InputError: devices were chosen that this host does not show.
        """
        paths = JobPaths(Path(self._plan.run_dir))
        for worker in self._node.workers:
            # The word of an earlier job or attempt must not be taken for this one's.
            paths.error_file(worker.rank).unlink(missing_ok=True)
        environ = without_outer(environ, self._plan.run_dir)
        if self._plan.program.kind != "command":
            environ |= pipe_environment(environ, run_dir=self._plan.run_dir)
        plan, cpus, note = _bound(self._plan, self._node, environ)
        if note is not None:
            self._relay.send(Note(text=note))
        address, port = rendezvous
        environs: dict[int, dict[str, str]] = {}
        for worker in plan.nodes[self._node.node_rank].workers:
            given = worker_environment(environ, plan, self._node, worker, address=address, port=port)
            self.recorders[worker.rank] = recorder_files(given, worker.rank)
            environs[worker.rank] = given
        gpus = gpus_of_ranks(self._node.gpus or find_gpus(Path("/")), list(environs.values()))
        placed = {rank: gpu for rank, gpu in zip(environs, gpus, strict=True) if gpu is not None}
        self._inquiry = GpuInquiry(placed, self._selector, self._relay.send)
        remove_empty_scopes()
        # Last: until the spawner knows of it, nobody would remove it after us.
        self._scope = make_scope(scope_name(self._plan.job_id, self._node.node_rank))
        if self._scope is not None:
            self._oom_kills.watch(self._scope.folder)
        self._spawner = SpawnerPipe(
            plan,
            self._node.node_rank,
            environ=environ,
            rendezvous=rendezvous,
            store=self._store,
            cpus=cpus,
            stdin_fd=stdin_fd,
            scope=self._scope,
            own_folder=self._own_folder,
            open_stream=self._relay.open_stream,
        )
        if self._store is not None:
            # The spawner has it now. Held here as well, it would listen on when nobody serves it.
            self._store.close()
        self._selector.register(self._spawner, selectors.EVENT_READ, self._read_spawner)

    @property
    def are_python(self) -> bool:
        """The ranks run a script or module, which dsrun begins for them."""
        return self._plan.program.kind != "command"

    @property
    def importing(self) -> list[int]:
        """The ranks that are there once the spawner has imported torch for them."""
        waits = self._plan.start == "fork" and self.are_python and self._spawner is not None and not self._rank_of
        return [worker.rank for worker in self._node.workers] if waits else []

    @property
    def live(self) -> list[RankProcess]:
        """The ranks whose end was not reported; empty until the spawner has told them."""
        return [rank for rank in self._live.values() if rank.rank not in self._ended]

    @property
    def pids(self) -> Collection[int]:
        """The ranks' processes, ended ones too; empty until the spawner has told them."""
        return self._rank_of

    @property
    def all_ended(self) -> bool:
        """Every rank's end was reported."""
        return len(self._ended) == len(self._node.workers)

    @property
    def spawner_ended(self) -> bool:
        """There is no spawner: it has ended, or could not be started."""
        return self._spawner is None

    def processes_left(self) -> list[psutil.Process]:
        """Everything below the agent but who asks the driver and the spawner, which stays to the end.

        See [Note: two reapers].
        """
        own = (None if self._spawner is None else self._spawner.pid, self._inquiry.pid)
        return [process for process in processes.descendants() if process.pid not in own]

    def is_asking(self, now_s: float) -> bool:
        """Whether the driver may still tell what is wrong with a GPU; `now_s` is monotonic."""
        return self._inquiry.is_open(now_s)

    def release_spawner(self) -> bool:
        """Lets the spawner exit, as nothing is left below it; returns whether it has."""
        if self._spawner is not None:
            self._spawner.release()
        return self._spawner is None

    def kill_spawner(self) -> bool:
        """Kills the spawner, and so all ranks that still run; returns whether there was one."""
        if self._spawner is not None:
            self._spawner.kill()
        return self._spawner is not None

    def kill_failed(self, now_s: float) -> None:
        """Kills ranks that have said why they fail, and still live when their grace is over; `now_s` is monotonic."""
        for rank in self._unfinished_failures.overdue(self.live, now_s):
            self._ended_for.add(rank.rank)
            processes.send(rank.process, signal.SIGKILL)

    def count_kills(self, now_s: float) -> None:
        """Notes what was killed for want of memory since the last time; `now_s` is monotonic."""
        self._oom_kills.look(now_s)

    def end_scope(self, *, remove: bool) -> None:
        """Kills what is in the job's control group, the spawner included; and removes the group if nothing is left.

        Args:
            remove: nothing is left that could be found otherwise.
        """
        if self._scope is None:
            return
        if remove:
            self._scope.remove()
        else:
            self._scope.kill()

    def reap(self, *, spawner_may_end: bool) -> None:
        """Collects and reports whatever has ended below the agent.

        Args:
            spawner_may_end: whether the spawner is being killed, so that its end is expected and not reported as a loss
                of the ranks.
        """
        ended = dict(processes.reap())
        for pid, status in ended.items():
            if pid in self._rank_of or not self._rank_of:
                self._orphans[pid] = status
        if self._spawner is not None and self._spawner.pid in ended:
            self._end_spawner(self._spawner, ended[self._spawner.pid], expected=spawner_may_end)
        if self._spawner is not None:
            # A rank is ours to reap only once the spawner is dying, which may be seen later, and is why it ended.
            return
        for pid, status in self._orphans.items():
            if pid in self._rank_of and self._rank_of[pid] not in self._ended:
                # Timed after the spawner's end, whose time says that it is the cause.
                self._report_exit(self._rank_of[pid], status, time.time())
        self._orphans.clear()

    def _end_spawner(self, spawner: SpawnerPipe, status: int, *, expected: bool) -> None:
        # What it reported before it died; the pipe ended with it.
        while spawner in self._selector.get_map() and self._read_spawner():
            pass
        spawner.close(status)
        self._spawner = None
        if not self.all_ended and not expected:
            self._on_lost(reason_of_end(status, self._oom_kills.recent(time.monotonic())))

    def _read_spawner(self) -> bool:
        """Takes what the spawner reports; returns whether more may come."""
        assert self._spawner is not None, "its pipe was registered"
        reports = self._spawner.read()
        if reports is None:
            self._selector.unregister(self._spawner)
            return False
        for message in reports:
            self._on_report(message)
        return True

    def _on_report(self, message: Message) -> None:
        match message:
            case Started(pids=pids):
                self._rank_of = {pid: worker.rank for pid, worker in zip(pids, self._node.workers, strict=True)}
                self._find(pids)
                self._relay.send(message)
            case Exit():
                self._report_exit(message.rank, message.status, message.time_s)
            case Failed(reason=reason):
                self._on_lost(reason)
            case Note():
                self._relay.send(message)
            case _:
                raise AssertionError(f"the spawner never sends {type(message).__name__}")

    def _find(self, pids: list[int]) -> None:
        for pid, worker in zip(pids, self._node.workers, strict=True):
            # One that has ended already is gone, and its pid another's soon; its report comes next.
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if self._spawner is not None and process.ppid() in (self._spawner.pid, os.getpid()):
                    self._live[worker.rank] = RankProcess(worker.rank, worker.local_rank, process)

    def _report_exit(self, rank: int, status: int, time_s: float) -> None:
        self._ended.add(rank)
        self.has_failed = self.has_failed or status != 0
        if rank in self._ended_for and status == -signal.SIGKILL:
            # What its interpreter would have returned; the signal was only ours.
            status = 1
        error = read_error_file(JobPaths(Path(self._plan.run_dir)).error_file(rank)) if status else None
        oom = self._oom_kills.recent(time.monotonic()) if status else None
        beat = self._last_beat(self._local_rank_of[rank])
        groups = _groups_of(self.recorders[rank]) if status and rank in self.recorders else None
        self._relay.send(
            Exit(
                rank=rank,
                status=status,
                time_s=time_s,
                error=error,
                oom=oom,
                step=None if beat is None else beat.step,
                groups=groups,
                coordinate="" if beat is None else beat.coordinate,
                phase="" if beat is None else beat.phase,
                collective="" if beat is None else beat.collective,
            )
        )
        if status and is_of_a_gpu(status, error):
            self._inquiry.ask(rank)

    def remove_pipes(self) -> None:
        """Removes the ranks' pipes, once nobody listens: whoever reads all files of the folder would wait there."""
        paths = JobPaths(Path(self._plan.run_dir))
        for rank, recorder in self.recorders.items():
            # Those of recorders may be where the user wants them.
            for pipe in (stacks_pipe(paths.stacks(rank)), recorder.pipe):
                if pipe is not None and pipe.parent == paths.folder:
                    with suppress(OSError):
                        pipe.unlink()


def _groups_of(recorder: RecorderFiles) -> list[GroupProgress] | None:
    """Returns what the dump says of a rank that has ended; None where it left none, or none that can be read."""
    if not recorder.is_fresh():
        return None
    try:
        return read_dump(recorder.read(most_bytes=MOST_BYTES))
    except (OSError, DumpError):
        # Half of a file, if it was killed in the middle: others' dumps say who is behind.
        return None


def _bound(
    plan: LaunchPlan, node: NodePlan, environ: Mapping[str, str]
) -> tuple[LaunchPlan, list[tuple[int, ...] | None], str | None]:
    """Shares this host's devices and cores among its ranks.

    Returns:
        the plan with the devices and threads of ranks, the CPUs of each, and what the user should know of it.
    """
    # With what the ranks of this host have in common: the front end may have chosen their GPUs.
    given = node_environment(environ, plan, node)
    devices = rank_variables(node, given)
    environs = [{**given, **worker.env, **own} for worker, own in zip(node.workers, devices, strict=True)]
    bindings = read_bindings(plan.bind, environs, gpus=node.gpus, whole_sockets=plan.steps_on_host)
    workers = tuple(
        replace(
            worker,
            env={**({} if THREADS_ENV in given else {THREADS_ENV: str(binding.threads)}), **worker.env, **own},
        )
        for worker, binding, own in zip(node.workers, bindings, devices, strict=True)
    )
    nodes = tuple(replace(other, workers=workers) if other is node else other for other in plan.nodes)
    return replace(plan, nodes=nodes), [binding.cpus for binding in bindings], slice_note(environs, given)
