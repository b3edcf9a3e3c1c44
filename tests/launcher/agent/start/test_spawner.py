"""The spawner starts ranks, reports their ends and leaves nothing behind when its lifeline ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsrun.contract.error_file import read_error_file
from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.agent.start.cgroup_scope import make_scope, scope_name
from dsrun.launcher.agent.start.spawner import open_gpu_files
from dsrun.launcher.agent.start.worker import node_environment
from dsrun.launcher.isolated_command import isolated_command
from dsrun.launcher.plan.launch_plan import LaunchPlan, StartMethod
from dsrun.launcher.protocol import Exit, FrameReader, Message, Spawn, Started, encode
from support.cli import clean_environment
from support.jobs import program_plan, script_plan
from support.processes import kill_left, wait_until_gone

pytestmark = pytest.mark.timeout(120)


class Spawner:
    """A spawner with this test as its agent."""

    def __init__(self, plan: LaunchPlan) -> None:
        pipes = [os.pipe() for _ in plan.nodes[0].workers]
        self.outputs = [os.fdopen(read_fd, "rb") for read_fd, _ in pipes]
        # Both streams of a rank go into one pipe, on a descriptor of its own each.
        output_fds = [(write_fd, os.dup(write_fd)) for _, write_fd in pipes]
        write_fds = [descriptor for pair in output_fds for descriptor in pair]
        self.process = subprocess.Popen(
            isolated_command(sys.executable, "dsrun.launcher.agent.start.spawner"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=node_environment(clean_environment(), plan, plan.nodes[0]),
            pass_fds=write_fds,
        )
        for write_fd in write_fds:
            os.close(write_fd)
        order = Spawn(
            plan=plan.to_json(),
            node_rank=0,
            agent_pid=os.getpid(),
            master_addr="127.0.0.1",
            master_port=1,
            store_fd=None,
            output_fds=output_fds,
            cpus=[None] * len(output_fds),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(encode(order))
        self.process.stdin.flush()
        self._reader = FrameReader()
        self._messages: list[Message] = []

    def next(self) -> Message:
        assert self.process.stdout is not None
        while not self._messages:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, "the spawner ended"
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)


@contextmanager
def spawner_for(plan: LaunchPlan) -> Iterator[Spawner]:
    spawner = Spawner(plan)
    try:
        yield spawner
        spawner.end()
        assert wait_until_gone(plan.job_id) == []
    finally:
        kill_left(plan.job_id)
        spawner.process.wait(10)
        for pipe in (spawner.process.stdin, spawner.process.stdout, *spawner.outputs):
            if pipe is not None:
                pipe.close()


WAIT = "import threading\nprint('ready', flush=True)\nthreading.Event().wait()\n"


def test_every_rank_is_reported_with_its_own_status(tmp_path: Path) -> None:
    source = "import os, signal\nrank = int(os.environ['RANK'])\nos.kill(os.getpid(), 9) if rank == 1 else exit(rank)\n"
    with spawner_for(script_plan(tmp_path, source, ranks=3)) as spawner:
        started = spawner.next()
        assert isinstance(started, Started)
        assert len(set(started.pids)) == 3
        messages = [spawner.next() for _ in range(3)]
    ends = {message.rank: message.status for message in messages if isinstance(message, Exit)}
    assert ends == {0: 0, 1: -9, 2: 2}


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_ranks_end_with_the_lifeline(tmp_path: Path, start: StartMethod) -> None:
    with spawner_for(script_plan(tmp_path, WAIT, start=start)) as spawner:
        assert [output.readline() for output in spawner.outputs] == [b"ready\n"] * 2
        assert spawner.end() == 0


def test_a_spawner_whose_agent_died_before_its_order_removes_the_jobs_control_group() -> None:
    scope = make_scope(scope_name(f"test-spawner-{os.getpid()}", 0))
    if scope is None:
        pytest.skip("no cgroup v2 in which this user may make a group")
    command = isolated_command(sys.executable, "dsrun.launcher.agent.start.spawner", str(scope.folder))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert scope.add(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    assert not scope.folder.exists()


RANK_STATE = """
import gc, os, signal, sys
print(os.getpgid(0) == os.getpid(), os.getcwd(), sys.stdin.read() == "", gc.isenabled())
links = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
print(sorted(os.path.basename(link) for fd, link in links.items() if fd not in "012" and os.path.exists(link)))
print(os.popen("ls /proc/self/fd | wc -l").read().strip())
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.getsignal(signal.SIGINT).__name__)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.environ["LOCAL_RANK"], os.getenv("A"))
print(sys.stdout.isatty(), sys.stdout.encoding, sys.stderr.errors, sys.executable)
"""


def test_forked_and_fresh_ranks_find_themselves_in_the_same_state(tmp_path: Path) -> None:
    seen: list[bytes] = []
    for start in ("exec", "fork"):
        plan = script_plan(tmp_path, RANK_STATE, ranks=1, start=start, env={"A": "b", "OMP_NUM_THREADS": "1"})
        with spawner_for(plan) as spawner:
            seen.append(spawner.outputs[0].read())
    assert seen[0] == seen[1]
    state = seen[0].decode().splitlines()
    # The file for its stacks and the FIFO for requests alone are open beside its streams, and neither in programs that
    # it starts.
    files, below = ["rank0.stacks.pipe", "rank0.stacks.txt"], "4"
    assert state[:5] == [f"True {tmp_path} True True", str(files), below, "True default_int_handler", "set() 0 b"]


@pytest.mark.parametrize(
    ("env", "needs", "imported"),
    [
        ({}, "torch.compile", False),
        ({"DSRUN_CONFIG": "/ds.json"}, "torch.compile", True),
        ({"DSRUN_CONFIG": "/ds.json"}, "dsrun.initialize", False),
    ],
)
def test_the_compiler_is_there_already_where_a_training_names_what_needs_it(
    tmp_path: Path, env: dict[str, str], needs: str, imported: bool
) -> None:
    look = "'torch.distributed' in sys.modules, 'torch._dyn' 'amo' in sys.modules"
    source = f"import sys, torch  # {needs}\nprint({look})"
    with spawner_for(script_plan(tmp_path, source, ranks=1, start="fork", env=env)) as spawner:
        assert spawner.outputs[0].read() == f"True {imported}\n".encode()


def test_forked_ranks_do_not_share_random_numbers_or_the_spawners_threads(tmp_path: Path) -> None:
    source = "import numpy, random, torch\nprint(random.random(), numpy.random.rand(), torch.get_num_threads())"
    plan = script_plan(tmp_path, source, start="fork")
    plan.nodes[0].workers[0].env["OMP_NUM_THREADS"] = "2"
    with spawner_for(plan) as spawner:
        rows = [output.read().split() for output in spawner.outputs]
    assert all(a != b for a, b in zip(*rows, strict=True))
    assert [row[2] for row in rows] == [b"2", b"1"]


def test_a_variable_of_one_rank_that_torch_has_read_is_named_there_alone(tmp_path: Path) -> None:
    plan = script_plan(tmp_path, "import torch\nprint('trained')", start="fork")
    plan.nodes[0].workers[1].env["TORCH_TRACE"] = "/traces"
    with spawner_for(plan) as spawner:
        words = [output.read() for output in spawner.outputs]
    assert words[0] == b"trained\n"
    assert words[1].startswith(b"dsrun: TORCH_TRACE was set after the start had imported torch")
    assert words[1].endswith(b"\ntrained\n")


def test_what_the_import_leaves_in_the_environment_is_not_there_before_the_scripts_own(tmp_path: Path) -> None:
    # torch._dynamo sets it where it is not set: a script's own setdefault would come too late.
    name = "TORCHINDUCTOR_CACHE_DIR"
    source = f"import os\nprint('{name}' in os.environ)\nimport torch._dynamo\n"
    plan = script_plan(tmp_path, source, ranks=1, start="fork", env={"DSRUN_CONFIG": "/ds.json"})
    with spawner_for(plan) as spawner:
        assert spawner.outputs[0].read().startswith(b"False\n")


def test_files_of_a_gpus_driver_are_found_among_those_that_are_open(tmp_path: Path) -> None:
    for number, file in enumerate(["/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia0", "/home/nvidia"]):
        (tmp_path / str(number)).symlink_to(file)
    assert open_gpu_files(str(tmp_path)) == ["/dev/nvidia0", "/dev/nvidiactl"]


def test_a_forked_rank_ends_like_an_interpreter(tmp_path: Path) -> None:
    source = (
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'atexit')\n"
        "gate = threading.Event()\n"
        "threading.Thread(target=lambda: (gate.wait(), print('thread'))).start()\n"
        "print('half', end='')\n"
        "gate.set()\n"
        "sys.exit('gone')\n"
    )
    with spawner_for(script_plan(tmp_path, source, ranks=1, start="fork")) as spawner:
        spawner.next()
        end = spawner.next()
        assert isinstance(end, Exit)
        assert end.status == 1
        text = spawner.outputs[0].read()
    # SystemExit's text comes after threads and before atexit or after it, as the interpreter likes; nothing is lost.
    assert text.startswith(b"half")
    assert {b"thread", b"gone", b"atexit"} <= set(text.removeprefix(b"half").split())


def word_of(plan: LaunchPlan) -> str:
    """What rank 0 left in its error file."""
    error = read_error_file(JobPaths(Path(plan.run_dir)).error_file(0))
    assert error is not None
    return error.message


def test_a_command_that_does_not_exist_gives_the_shells_code_and_says_so(tmp_path: Path) -> None:
    plan = program_plan(tmp_path, "command", "no-such-program", ranks=1)
    with spawner_for(plan) as spawner:
        spawner.next()
        end = spawner.next()
    assert isinstance(end, Exit)
    assert end.status == 127
    assert word_of(plan) == "error: command: cannot run 'no-such-program': No such file or directory"


def test_a_script_whose_interpreter_is_missing_is_not_called_missing_itself(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    plan = program_plan(tmp_path, "command", str(script), ranks=1)
    with spawner_for(plan) as spawner:
        spawner.next()
        end = spawner.next()
    assert isinstance(end, Exit)
    assert end.status == 127
    assert word_of(plan).endswith("the interpreter of its first line is not here")


def test_a_working_folder_that_does_not_exist_is_bad_input(tmp_path: Path) -> None:
    plan = program_plan(tmp_path, "command", "true", ranks=1)
    missing = LaunchPlan.from_json({**plan.to_json(), "cwd": "/no/such/folder"})
    with spawner_for(missing) as spawner:
        spawner.next()
        end = spawner.next()
    assert isinstance(end, Exit)
    assert end.status == 2
    assert (
        word_of(plan) == "error: working folder: cannot enter '/no/such/folder' on this host: No such file or directory"
    )
