"""The spawner: makes the ranks of one host, serves their rendezvous store, and tells the agent how each ended.

Started by the agent with a `Spawn` message on stdin, which stays open as the lifeline until `Release`; reports go
to stdout. Decides nothing: which signal goes to whom, and when, is the agent's business. The only process of the
launcher that imports torch.

[Note: order] With `fork`, torch is imported, then the ranks are forked, then the store is served: the store has
threads, which a fork would lose. With `exec`, ranks start first and torch is imported meanwhile. Either way the
socket listens before any rank exists, so early connections wait in its backlog.

[Note: GPUs and forks] A process that has opened a GPU cannot be forked: CUDA answers its children with an error. So
nothing here may touch CUDA or NVML before the ranks exist, and the import of torch touches neither. What makes it do so
(a profiler's variable, a `.pth` file or `sitecustomize` of the user's) is looked for before and after the import; the
ranks then start as with `exec`, and a note says why.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dsrun.contract.environment import CONFIG_ENV, NONCE_KEY
from dsrun.errors import DsrunError

from ... import processes
from ...os_errors import refusal_of
from ...plan.launch_plan import LaunchPlan, NodePlan, WorkerSpec
from ...plan.program import names_compiler
from ...protocol import Exit, Failed, FrameReader, Message, Note, Spawn, Started, encode
from . import bootstrap
from .cgroup_scope import Scope
from .worker import enter_worker, exec_program, worker_environment

_READ_BYTES = 1 << 16
#: Longest wait for killed processes to be gone; who waits for the agent's end must not wait for a stuck disk.
_KILL_PATIENCE_S = 5.0
#: Has torch connect its profiler, and with it CUPTI, to a daemon while it is imported.
_PROFILER_ENV = "KINETO_USE_DAEMON"
#: How the names of files begin by which drivers hand out their GPUs.
_GPU_FILES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")
_EACH_ITSELF = "each rank imports torch itself, as with `--start exec`"


@dataclass(frozen=True, slots=True)
class _Job:
    order: Spawn
    plan: LaunchPlan
    node: NodePlan
    report_fd: int
    #: This process's environment before it imported torch, which leaves variables of its own there.
    environ: Mapping[str, str]

    def report(self, message: Message) -> None:
        os.write(self.report_fd, encode(message))

    def give_up(self, what: str, error: Exception) -> None:
        self.fail(f"{what}: {type(error).__name__}: {error}")

    def fail(self, reason: str) -> None:
        # Short enough to be one atomic write, as another thread may report too.
        self.report(Failed(reason=reason[:2000], time_s=time.time()))

    def environment(self, worker: WorkerSpec) -> dict[str, str]:
        address, port = self.order.master_addr, self.order.master_port
        return worker_environment(self.environ, self.plan, self.node, worker, address=address, port=port)

    def note(self, text: str) -> None:
        self.report(Note(text=text))

    @property
    def may_fork(self) -> bool:
        return self.plan.start == "fork" and self.plan.program.kind != "command"


@dataclass(frozen=True, slots=True)
class _Traces:
    """What the agent would remove at the end, and this process does if it cannot.

    Attributes:
        scope: the job's control group, if there is one.
        own_folder: the host's own folder for the job's files, if it has one.
    """

    scope: Scope | None
    own_folder: str | None

    def remove(self) -> None:
        if self.scope is not None:
            self.scope.leave()
            self.scope.remove()
        if self.own_folder is not None:
            # There is nobody left to tell of what cannot be removed.
            shutil.rmtree(self.own_folder, ignore_errors=True)


def main() -> None:
    """Entry of the process; in a forked rank this goes on as the user's program.

    argv: folder of the job's control group, if there is one. This process removes it should the agent die, so it must
    know of it from the first moment on.
    """
    processes.outlive_user_signals()
    scope = Scope(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    # What libraries print at import must not end up between our messages.
    report_fd = os.dup(1)
    os.dup2(2, 1)
    order = _read_order()
    if order is None:
        # The agent died before it said what to do; nothing was started.
        _Traces(scope, None).remove()
        os._exit(0)
    traces = _Traces(scope, order.plan["run_dir"] if order.own_folder else None)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, partial(_on_stop_signal, traces, order.agent_pid))
    processes.become_subreaper()
    # Not SIGKILL: ranks may have children that carry no death signal, and only we can still find them.
    processes.die_with_parent(order.agent_pid, signal.SIGTERM)
    for descriptor in _passed_fds(order):
        # They came here by inheritance; programs that ranks start must not have them as well.
        os.set_inheritable(descriptor, False)
    plan = LaunchPlan.from_json(order.plan)
    job = _Job(order, plan, plan.nodes[order.node_rank], report_fd, os.environ.copy())
    forks = job.may_fork and _import_torch(job)
    pids: dict[int, int] = {}
    for worker in job.node.workers:
        pid = _start_rank(job, worker, forks=forks)
        if pid == 0:
            # Back up to the interpreter's own end from here, so that atexit, threads and streams end as usual.
            bootstrap.run(plan.program.kind, plan.program.target, plan.program.args)
            return
        pids[pid] = worker.rank
    # For the ranks alone: the import for the store would have this process profiled too.
    os.environ.pop(_PROFILER_ENV, None)
    _supervise(job, pids, traces)


def _read_order() -> Spawn | None:
    reader = FrameReader()
    while data := os.read(0, _READ_BYTES):
        for message in reader.feed(data):
            assert isinstance(message, Spawn), "the agent's first message is its order"
            return message
    return None


def _on_stop_signal(traces: _Traces, agent_pid: int, _signum: int, _frame: FrameType | None) -> None:
    """Ends everything where it is the agent's death that is told. See `die_with_parent`."""
    # A scheduler that ends a job signals each of its processes, the agent too: that one gives the ranks their grace.
    if os.getppid() == agent_pid:
        return
    processes.kill_descendants(patience_s=_KILL_PATIENCE_S)
    traces.remove()
    os._exit(1)


def _import_torch(job: _Job) -> bool:
    """Imports torch for all ranks; returns whether they can be forked from here. See [Note: GPUs and forks]."""
    if _PROFILER_ENV in os.environ:
        job.note(f"{_PROFILER_ENV} is set, which opens the GPU while torch is imported: {_EACH_ITSELF}")
        return False
    # What is imported stays: not looked for garbage while it grows, nor in the ranks, so its pages stay shared.
    gc.disable()
    try:
        importlib.import_module("torch.distributed")
        if CONFIG_ENV in job.plan.env and names_compiler(job.plan.program, folder=job.plan.cwd):
            # It takes as long as torch itself. A job with a training config that probably needs it imports it once for
            # all ranks; others do without, see decision 0061, or would only see their first line later.
            importlib.import_module("torch._dynamo")
    except Exception as error:
        job.give_up("cannot import torch", error)
        os._exit(1)
    finally:
        gc.freeze()
        gc.enable()
    files = open_gpu_files()
    if files or _cuda_is_initialized():
        job.note(f"the import of torch opened {files[0] if files else 'CUDA'}: {_EACH_ITSELF}")
        return False
    return True


def open_gpu_files(folder: str = "/proc/self/fd") -> list[str]:
    """Returns the drivers' files that this process has open.

    Args:
        folder: folder of links to open files, as /proc has it.
    """
    found: list[str] = []
    for entry in os.listdir(folder):
        # The listing's own descriptor is gone.
        with suppress(FileNotFoundError):
            found.append(os.readlink(os.path.join(folder, entry)))
    return sorted({file for file in found if file.startswith(_GPU_FILES)})


def _cuda_is_initialized() -> bool:
    import torch

    return torch.cuda.is_initialized()


def _start_rank(job: _Job, worker: WorkerSpec, *, forks: bool) -> int:
    """Returns the new rank's pid, and 0 in the new rank itself where that is a fork."""
    environment = job.environment(worker)
    spawner_pid = os.getpid()
    stdout_fd, stderr_fd = job.order.output_fds[worker.local_rank]
    sys.stderr.flush()
    # What a library left in C's buffers would be written once more by every rank.
    ctypes.CDLL(None).fflush(None)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at a fork. The only ones here are pools of math libraries, which handle it.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            # Those that run already die with this process.
            job.fail(f"cannot start rank {worker.rank}: {refusal_of(error)}")
            os._exit(1)
    if pid != 0:
        return pid
    try:
        cpus = job.order.cpus[worker.local_rank]
        enter_worker(
            spawner_pid,
            cwd=job.plan.cwd,
            cpus=cpus,
            stdin_fd=job.order.stdin_fd if worker.rank == job.plan.stdin_rank else None,
            stdout_fd=stdout_fd,
            stderr_fd=stderr_fd,
        )
        if forks:
            bootstrap.enter_forked_rank(environment, imported_in=job.environ)
            _close_inherited(job)
            return 0
        code, error = exec_program(job.plan.program, environment)
    except DsrunError as caught:
        code, error = caught.exit_code, caught
    bootstrap.enter_forked_rank(environment)
    _die(error, code)


def _close_inherited(job: _Job) -> None:
    """Closes the spawner's own files: a rank that kept them would keep the agent from seeing ends of file."""
    for descriptor in (job.report_fd, *_passed_fds(job.order)):
        os.close(descriptor)


def _passed_fds(order: Spawn) -> list[int]:
    output_fds = [descriptor for pair in order.output_fds for descriptor in pair]
    return [*output_fds, *(each for each in (order.store_fd, order.stdin_fd) if each is not None)]


def _die(error: DsrunError, code: int) -> NoReturn:
    """Ends a rank that never became the user's program, without unwinding the spawner's frames."""
    try:
        bootstrap.fail(error, code)
    finally:
        os._exit(code)


def _supervise(job: _Job, rank_of: dict[int, int], traces: _Traces) -> NoReturn:
    """Reports every rank's end until the agent needs no spawner any more, or is dead; kills what is left then."""
    wake_fd, woken_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, processes.wake_up)
    for pair in job.order.output_fds:
        for descriptor in pair:
            os.close(descriptor)
    if job.order.stdin_fd is not None:
        # Whoever writes to it is to see when the rank reads no more.
        os.close(job.order.stdin_fd)
    try:
        job.report(Started(pids=list(rank_of)))
        if job.order.store_fd is not None:
            # A thread, so that ranks which end during the import are seen at once.
            server = threading.Thread(target=_serve_store, args=(job, job.order.store_fd), daemon=True)
            try:
                server.start()
            except RuntimeError as error:
                job.fail(f"cannot serve the rendezvous store: {refusal_of(error) or error}")
        released = _wait_for_word(job, rank_of, wake_fd)
    except BrokenPipeError:
        released = False  # The agent died; the lifeline would have said so next.
    if not released:
        processes.kill_descendants(patience_s=_KILL_PATIENCE_S)
        traces.remove()
    # Not through the interpreter's end: torch may be half imported in the thread.
    os._exit(0)


def _wait_for_word(job: _Job, rank_of: dict[int, int], wake_fd: int) -> bool:
    """Reports ends until the agent releases this process, or dies; returns whether it was the former."""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(wake_fd, selectors.EVENT_READ)
        while True:
            # First, for ranks that ended before anything listened.
            _report_ends(job, rank_of)
            ready = {key.fd for key, _ in selector.select()}
            if wake_fd in ready:
                os.read(wake_fd, _READ_BYTES)
            if 0 in ready:
                return os.read(0, _READ_BYTES) != b""


def _report_ends(job: _Job, rank_of: dict[int, int]) -> None:
    for pid, status in processes.reap():
        rank = rank_of.pop(pid, None)
        if rank is not None:
            job.report(Exit(rank=rank, status=status, time_s=time.time()))


def _serve_store(job: _Job, listen_fd: int) -> None:
    try:
        import torch.distributed

        store = torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # public, and documented
            job.order.master_addr,
            job.order.master_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        # Ranks ask for it first, and wait: a store without it, or with another, is not their job's.
        store.set(NONCE_KEY, job.plan.nonce)
    except Exception as error:
        job.give_up("cannot serve the rendezvous store", error)
        return
    # It serves as long as the object lives: this thread holds it until the process ends.
    threading.Event().wait()
    del store
