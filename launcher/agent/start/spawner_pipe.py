"""The agent's end of the spawner: starts it, hands it its order and the store's socket, reads its reports.

Decides nothing and waits for nothing: the agent says when to read, and reaps the process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ...failures.causes.recognise import cause_of
from ...failures.report import describe_status
from ...isolated_command import isolated_command
from ...plan.launch_plan import LaunchPlan
from ...process_modules import SPAWNER
from ...protocol import FrameReader, Message, OomKill, Release, Spawn, StreamName, encode
from .cgroup_scope import Scope
from .worker import node_environment

_READ_BYTES = 1 << 16


class SpawnerPipe:
    """A running spawner.

    Args:
        plan: the launch.
        node_rank: rank of this host among the plan's hosts.
        environ: environment that the ranks inherit.
        rendezvous: address and port of the store.
        store: its listening socket, bound to them; None where another host serves it.
        cpus: CPUs of each worker, see `Spawn`.
        stdin_fd: descriptor that the plan's `stdin_rank` reads as its stdin, if that is a rank of this host; None for
            none. It stays open in this process.
        scope: control group for the job's processes, if there is one.
        own_folder: whether the plan's run folder is this host's own, so that the spawner removes it should the agent
            die; see `Spawn`.
        open_stream: function that makes the pipe for a stream of a rank, given rank and stream name, and returns its
            write end.

    Raises:
        OSError: the interpreter cannot be run, or a pipe not made.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        node_rank: int,
        *,
        environ: Mapping[str, str],
        rendezvous: tuple[str, int],
        store: socket.socket | None,
        cpus: Sequence[Sequence[int] | None],
        stdin_fd: int | None,
        scope: Scope | None,
        own_folder: bool,
        open_stream: Callable[[int, StreamName], int],
    ) -> None:
        node, program = plan.nodes[node_rank], plan.program
        python = sys.executable if program.kind == "command" else program.python
        store_fds = [] if store is None else [store.fileno()]
        write_fds: list[int] = []
        try:
            for worker in node.workers:
                write_fds.append(open_stream(worker.rank, "stdout"))
                write_fds.append(open_stream(worker.rank, "stderr"))
            self._process = subprocess.Popen(
                isolated_command(python, SPAWNER, *([] if scope is None else [str(scope.folder)])),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=node_environment(environ, plan, node),
                pass_fds=[*store_fds, *write_fds, *([] if stdin_fd is None else [stdin_fd])],
            )
        finally:
            # Ours are closed, so that a pipe ends with the last process that writes to it.
            for descriptor in write_fds:
                os.close(descriptor)
        # Before its order, without which it starts nothing that could be left outside.
        if scope is not None:
            scope.add(self._process.pid)
        order = Spawn(
            plan=plan.to_json(),
            node_rank=node_rank,
            agent_pid=os.getpid(),
            master_addr=rendezvous[0],
            master_port=rendezvous[1],
            store_fd=store_fds[0] if store_fds else None,
            output_fds=list(zip(write_fds[::2], write_fds[1::2], strict=True)),
            cpus=[None if numbers is None else list(numbers) for numbers in cpus],
            stdin_fd=stdin_fd,
            own_folder=own_folder,
        )
        assert self._process.stdin is not None, "stdin is a pipe"
        assert self._process.stdout is not None, "stdout is a pipe"
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = FrameReader()
        with suppress(BrokenPipeError):
            # It died at once; the end of its reports says so.
            self._stdin.write(encode(order))
            self._stdin.flush()

    @property
    def pid(self) -> int:
        """The spawner's process."""
        return self._process.pid

    def fileno(self) -> int:
        """What a selector waits on for reports."""
        return self._stdout.fileno()

    def read(self) -> list[Message] | None:
        """Returns the reports that have come, or None once there will be no more. May wait for the first byte."""
        data = os.read(self.fileno(), _READ_BYTES)
        return self._reader.feed(data) if data else None

    def release(self) -> None:
        """Lets the spawner exit, once nothing is left below it. May be called twice."""
        if not self._stdin.closed:
            with suppress(BrokenPipeError):
                self._stdin.write(encode(Release()))
                self._stdin.close()

    def kill(self) -> None:
        """Kills the spawner, which the agent has not reaped yet; ranks that still run die with it."""
        # Not Popen.kill, which may reap the process itself, and then the agent would wait for its end in vain. The
        # pid cannot be another's before the agent has reaped it.
        os.kill(self.pid, signal.SIGKILL)

    def close(self, status: int) -> None:
        """Closes both pipes, once the agent has reaped the process with this status."""
        # So that the Popen object does not look for a process whose pid may belong to another by then.
        self._process.returncode = status
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()


def reason_of_end(status: int, oom: OomKill | None) -> str:
    """Says that a spawner ended before its ranks did, and what is known of why.

    Args:
        status: exit code, or minus the signal's number.
        oom: the last kill for want of memory, if it was just before; it may be the spawner, which has torch loaded.
            None where there was none.
    """
    cause = None if oom is None else cause_of(status, "", "", (), oom=oom)
    words = "" if cause is None or not cause.words else f": {cause.words}"
    return f"the spawner {describe_status(status)} before its ranks ended{words}"
