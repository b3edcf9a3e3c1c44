"""What it costs to start, run and end a job, against `import torch`, torchrun, and deepspeed where it is installed.

    python scripts/bench/launch.py [--runs 10] [--ranks 2 8] [--deepspeed /path/to/python] [--skip logs ...]

All commands of a section are run in turn, round by round, after one round that is not counted; ratios are of the same
round. Prints Markdown tables: median, least and most, and what the project demands (a bar) with whether it is met.

Sections:
    commands  whole processes: `dsrun --help` and the like, and `python -c "import torch"`, the unit of all ratios
    jobs      from the start of the launcher to the first line after an all-reduce, and to the launcher's own end
    death     from SIGKILL of one rank to the end of the last process of the job, launcher included
    memory    what agent and front end have resident while eight ranks wait
    logs      scripts/bench/log_throughput.py

deepspeed belongs into an environment of its own, for it must not change the project's:
    python -m venv /tmp/ds && /tmp/ds/bin/pip install torch deepspeed
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rounds import Bar, Rows

ALL_REDUCE = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
os.write(1, b"sum %d\\n" % int(value))  # in one piece: torchrun's ranks share one pipe
dist.barrier()  # or a rank that leaves early breaks the connections of those behind it
dist.destroy_process_group()
"""
WAIT = """
import os, threading
os.write(1, f"pid {os.environ['RANK']} {os.getpid()}\\n".encode())
threading.Event().wait()
"""
LIMIT_S = 120.0
SECTIONS = ("commands", "jobs", "death", "memory", "logs")
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to start a script on several ranks.

    Attributes:
        name: name of the launcher in the table.
        words: function that gets a number of ranks and a script, and returns the command that starts them.
        env: variables on top.
    """

    name: str
    words: Callable[[int, str], list[str]]
    env: Mapping[str, str]


def launchers(folder: Path, deepspeed: str | None) -> list[Launcher]:
    """Returns those to be compared."""
    python = sys.executable

    def dsrun(start: str) -> Callable[[int, str], list[str]]:
        head = [python, "-m", "dsrun", "run", "-q", "--log-dir", str(folder), "--start", start]
        return lambda ranks, script: [*head, "-n", str(ranks), script]

    def torchrun(ranks: int, script: str) -> list[str]:
        return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]

    known = [Launcher(f"dsrun {start}", dsrun(start), {}) for start in ("fork", "exec")]
    known.append(Launcher("torchrun", torchrun, {}))
    if deepspeed is not None:

        def runner(ranks: int, script: str) -> list[str]:
            head = [deepspeed, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--num_gpus", str(ranks)]
            return [*head, "--master_port", str(free_port()), script]

        # It finds neither GPU nor hostfile, and takes this machine's processor for as many as are asked for.
        known.append(Launcher("deepspeed", runner, {"DS_ACCELERATOR": "cpu"}))
    return known


def free_port() -> int:
    """Returns a port that was free a moment ago, for launchers that cannot choose one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def running(
    words: Sequence[str], folder: Path, env: Mapping[str, str]
) -> Generator[subprocess.Popen[bytes], None, None]:
    """A launcher with its output on one pipe; whatever lives below it is killed in the end."""
    process = subprocess.Popen(
        list(words),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for left in tree(process.pid):
            # psutil compares the start time, lest another process has the pid by now.
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait(LIMIT_S)
        assert process.stdout is not None
        process.stdout.close()


def tree(pid: int) -> list[psutil.Process]:
    """Returns a process and everything below it that lives."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_for_lines(process: subprocess.Popen[bytes], pattern: bytes, count: int) -> list[Any]:
    """Reads output until so many lines match; returns what they hold. What was read beyond them is lost."""
    said = b""
    while len(found := re.findall(pattern + rb"\r?\n", said)) < count:
        data = read(process)
        assert data, f"{process.args}: no {pattern!r} in:\n{said.decode(errors='replace')}"
        said += data
    return found


def read(process: subprocess.Popen[bytes]) -> bytes:
    """Returns output, or nothing at its end."""
    assert process.stdout is not None
    ready = select.select([process.stdout], [], [], LIMIT_S)[0]
    assert ready, f"{process.args}: neither output nor an end for {LIMIT_S:g} s"
    return os.read(process.stdout.fileno(), 1 << 16)


def wait_for_end(pids: Sequence[int]) -> None:
    """Waits until none of these processes runs, children of this one or not."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([descriptor], [], [], LIMIT_S)[0]
        os.close(descriptor)
        assert ended, f"process {pid} has not ended in {LIMIT_S:g} s"


# Sections


def commands(rows: Rows, folder: Path) -> None:
    """Times whole commands."""
    script, config = folder / "all_reduce.py", folder / "ds.json"
    script.write_text(ALL_REDUCE)
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}')
    dsrun = [sys.executable, "-m", "dsrun"]
    timed = {
        "import torch": [sys.executable, "-c", "import torch"],
        "dsrun --help": [*dsrun, "--help"],
        "dsrun probe": [*dsrun, "probe"],
        "dsrun --dry-run": [*dsrun, "--dry-run", str(script)],
        "dsrun config check": [*dsrun, "config", "check", str(config)],
    }
    for round_ in rows.rounds():
        for name, words in timed.items():
            began_s = time.perf_counter()
            subprocess.run(words, check=True, capture_output=True, cwd=folder, timeout=LIMIT_S)
            rows.add(name, time.perf_counter() - began_s, round_)


def jobs(rows: Rows, folder: Path, ranks: Sequence[int], compared: Sequence[Launcher]) -> None:
    """Times the first line after an all-reduce, and the whole run."""
    script = folder / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    for round_ in rows.rounds():
        began_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=LIMIT_S)
        rows.add("import torch", time.perf_counter() - began_s, round_)
        for count in ranks:
            for launcher in compared:
                began_s = time.perf_counter()
                with running(launcher.words(count, str(script)), folder, launcher.env) as process:
                    wait_for_lines(process, rb"sum (\d+)", 1)
                    rows.add(f"{launcher.name}, {count} ranks, first line", time.perf_counter() - began_s, round_)
                    while read(process):
                        pass
                    code = process.wait(LIMIT_S)
                    rows.add(f"{launcher.name}, {count} ranks, whole run", time.perf_counter() - began_s, round_)
                assert code == 0, f"{launcher.name} exited with {code}"


def death(rows: Rows, folder: Path, count: int, compared: Sequence[Launcher]) -> None:
    """Times the end of everything after one rank was killed; ranks end at the first SIGTERM."""
    script = folder / "wait.py"
    script.write_text(WAIT)
    for round_ in rows.rounds():
        for launcher in compared:
            with running(launcher.words(count, str(script)), folder, launcher.env) as process:
                pids = dict(wait_for_lines(process, rb"pid (\d+) (\d+)", count))
                everything = [one.pid for one in tree(process.pid)]
                began_s = time.perf_counter()
                os.kill(int(pids[b"1"]), signal.SIGKILL)
                process.wait(LIMIT_S)
                wait_for_end(everything)
                rows.add(f"{launcher.name}, {count} ranks", time.perf_counter() - began_s, round_)


def memory(rows: Rows, folder: Path, count: int, compared: Sequence[Launcher]) -> None:
    """Measures the launcher's own processes while the ranks wait."""
    script = folder / "wait.py"
    script.write_text(WAIT)
    for round_ in rows.rounds():
        for launcher in compared:
            with running(launcher.words(count, str(script)), folder, launcher.env) as process:
                ranks = {int(pid) for _, pid in wait_for_lines(process, rb"pid (\d+) (\d+)", count)}
                rows.add(
                    f"{launcher.name}, front end", psutil.Process(process.pid).memory_info().rss / MEGABYTE, round_
                )
                for below in tree(process.pid)[1:]:
                    words = " ".join(below.cmdline())
                    part = re.search(r"dsrun\.launcher\.(agent|spawner)|deepspeed\.launcher\.(launch)", words)
                    if part is not None and below.pid not in ranks:
                        name = f"{launcher.name}, {part[1] or part[2]}"
                        rows.add(name, below.memory_info().rss / MEGABYTE, round_)


def bars(ranks: Sequence[int]) -> dict[str, list[Bar]]:
    """Returns what the project demands of each row."""
    of_launch = {
        2: [Bar(1.3, "import torch")],
        8: [Bar(1.5, "import torch"), Bar(0.2, "torchrun, 8 ranks, first line")],
    }
    demanded = {f"dsrun fork, {count} ranks, first line": of_launch.get(count, []) for count in ranks}
    demanded["dsrun --help"] = [Bar(0.150)]
    for start in ("fork", "exec"):
        demanded[f"dsrun {start}, {max(ranks)} ranks"] = [Bar(2.0)]
        demanded[f"dsrun {start}, agent"] = [Bar(30)]
        demanded[f"dsrun {start}, front end"] = [Bar(80)]
    return demanded


def main() -> None:
    """Runs the sections and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="rounds that count")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed")
    parser.add_argument("--skip", nargs="*", default=[], choices=SECTIONS, help="sections to leave out")
    args = parser.parse_args()
    demanded, most = bars(args.ranks), max(args.ranks)
    wanted = [section for section in SECTIONS if section not in args.skip]
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {args.runs} rounds")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compared = launchers(folder / "jobs", args.deepspeed)
        if "commands" in wanted:
            rows = Rows(args.runs)
            commands(rows, folder)
            print(f"\n## Commands\n{rows.table('s', demanded, ratio_to='import torch')}", flush=True)
        if "jobs" in wanted:
            rows = Rows(args.runs)
            jobs(rows, folder, args.ranks, compared)
            print(f"\n## Jobs\n{rows.table('s', demanded, ratio_to='import torch')}", flush=True)
        if "death" in wanted:
            rows = Rows(args.runs)
            death(rows, folder, most, compared)
            print(f"\n## From the death of a rank to the end of all\n{rows.table('s', demanded)}", flush=True)
        if "memory" in wanted:
            rows = Rows(args.runs)
            memory(rows, folder, most, compared)
            print(f"\n## Memory with {most} ranks\n{rows.table('MB', demanded)}", flush=True)
    if "logs" in wanted:
        print("\n## Logs, at least 50 MB/s in sum\n", flush=True)
        script = Path(__file__).with_name("log_throughput.py")
        subprocess.run([sys.executable, str(script), "--runs", str(args.runs)], check=True)


if __name__ == "__main__":
    main()
