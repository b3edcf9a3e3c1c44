"""What several hosts cost over ssh: from the command to the first line, preflight, and bytes on the channels.

    python scripts/bench/hosts.py [--runs 2] [--hosts 1 4 16 64] [--torch-hosts 1 2 4] [--skip bytes ...]

Needs root, sshd and iproute2: hosts are namespaces of this machine, each with a network stack, mounts, processes and an
sshd of its own, on one bridge (tests/support/namespaces.py). They share its cores, so that with their number grows what
each core does: all surveyors, agents and ranks of 64 hosts run on this one machine, which real hosts would do at once.
The network costs nothing. The job's folder is seen by all hosts. Their shells have no start-up files.

Rounds are interleaved; ratios are of the same round. The round that is not counted takes one host only.
Prints Markdown tables: median, least and most, and what the project demands with whether it is met.

Sections:
    connect    from the start of `dsrun -H hosts ...` as a process, to its notes, to the start of the last rank
               (events.jsonl), to the first line of rank 0, to its end; times are from the start, not from the row
               above. Once with a program that prints a word, and once with a script that takes an all-reduce with
               torch. The floors are plain `ssh host true` of all hosts at once, and as many `import torch` at once.
               With two hosts, torchrun as well: one is started on each host by hand, at once, and told where to meet;
               no ssh, no preflight, no logs. pdsh and deepspeed are not compared.
    preflight  as `dsrun doctor -H` does it, a process each time: reaching all hosts, each question, and the whole
    bytes      see channel_bytes.py, `--byte-runs` jobs each
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import channel_bytes
from launch import LIMIT_S, read, running
from rounds import Bar, Rows

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from dsrun.launcher.hosts.hostfile import read_hostfile
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.plan.launch_plan import DEFAULT_LEASE_S
from dsrun.launcher.transport.choice import ReachSettings, TransportName, make_transport
from support.many_hosts import hostfile
from support.namespaces import Rig, why_no_hosts
from support.namespaces import hosts as made_hosts

SECTIONS = ("connect", "preflight", "bytes")
WAYS: tuple[TransportName, ...] = ("ssh", "openssh")
#: More hosts than that are left out of the round that is not counted.
MOST_IN_WARM_UP = 1
#: Of preflight, and for how many hosts.
BAR_S, BAR_HOSTS = 5.0, 16
FIRST_LINE = b"up 0\n"
#: What the front end says, in this order, when it has come so far.
NOTES = {"first knock": b"dsrun: reaching ", "hosts compared": b"dsrun: preflight: ", "first line": FIRST_LINE}
ALL_REDUCE = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os.write(1, b"up %d\\n" % dist.get_rank())
dist.barrier()  # or a rank that leaves early breaks the connections of those behind it
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where it is measured.

    Attributes:
        rig: the hosts.
        listed: their hostfile.
        folder: seen by all hosts under this path.
    """

    rig: Rig
    listed: Path
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """Of all that is started: no GPU, and jobs written down here."""
        return {"XDG_STATE_HOME": str(self.folder / "state"), "CUDA_VISIBLE_DEVICES": ""}

    def hosts(self, count: int) -> tuple[HostSpec, ...]:
        """Returns the first of the hosts."""
        return read_hostfile(self.listed)[:count]

    def new_folder(self) -> Path:
        """Returns an empty one that all hosts see."""
        return Path(tempfile.mkdtemp(dir=self.folder))


@dataclass(frozen=True, slots=True)
class Job:
    """What is started on the hosts.

    Attributes:
        title: title of the job's tables.
        words: words of the command after `dsrun run` and the options about hosts.
        floor: name of the floor for so many hosts.
        run_floor: function that does the work of the floor for a number of hosts.
        torchrun: words after torchrun and its options; None where it is not compared.
    """

    title: str
    words: tuple[str, ...]
    floor: Callable[[int], str]
    run_floor: Callable[[int], None]
    torchrun: tuple[str, ...] | None = None


def introduce(rig: Rig) -> None:
    """Tells all hosts the link addresses of all others, and this machine too.

    The table of neighbours is the kernel's, so that namespaces share what every real host has for itself: 1,024 places,
    and 64 hosts that all try each other would need 4,032. What is entered by hand takes none of them.
    """
    nodes = [*rig.hosts, rig.front]
    link_of = {node.address: node.run("cat", f"/sys/class/net/{node.device}/address").strip() for node in nodes}
    for node in nodes:
        batch = rig.folder / f"neighbours_of_{node.name}"
        batch.write_text(
            "".join(
                f"neigh replace {address} lladdr {link} dev {node.device} nud permanent\n"
                for address, link in link_of.items()
                if address != node.address
            )
        )
        node.run("ip", "-batch", str(batch))


def quieten_shells(rig: Rig) -> None:
    """Gives bash on each host an empty start-up file.

    They would all run root's own of this machine, which may wait for one another there (`pyenv init` takes a lock in
    the home folder), as no two real hosts do that have homes of their own.
    """
    start_up = Path.home() / ".bashrc"
    if not start_up.exists():
        return
    empty = rig.folder / "bashrc"
    empty.touch()
    for host in rig.hosts:
        host.run("mount", "--bind", str(empty), str(start_up))


def all_at_once(commands: Sequence[Sequence[str]]) -> None:
    """Runs commands beside each other to their end."""
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(words, stdin=subprocess.DEVNULL)) for words in commands]
        for process in started:
            assert process.wait(LIMIT_S) == 0, f"{process.args} ended with {process.returncode}"


# From the command to the first line


def jobs(bench: Bench) -> list[Job]:
    """Returns the two jobs of the section, in the order of `--hosts` and `--torch-hosts`."""
    script = bench.folder / "all_reduce.py"
    script.write_text(ALL_REDUCE)

    def log_in(count: int) -> None:
        ssh = ("ssh", "-F", str(bench.rig.ssh_config), "-o", "BatchMode=yes")
        all_at_once([(*ssh, host.address, "true") for host in bench.rig.hosts[:count]])

    def import_torch(count: int) -> None:
        all_at_once([(sys.executable, "-c", "import torch")] * count)

    def floor_of(name: str) -> Callable[[int], str]:
        return lambda count: name if count == 1 else f"{count} x {name}"

    shell = ("--no-python", "/bin/sh", "-c", "echo up $RANK")
    return [
        Job("a program that prints a word", shell, floor_of("ssh host true"), log_in),
        Job("torch and an all-reduce", (str(script),), floor_of("import torch"), import_torch, (str(script),)),
    ]


def connect(bench: Bench, job: Job, sizes: Sequence[int], ways: Sequence[TransportName], runs: int) -> None:
    """Times a job on each number of hosts, and prints a table for each."""
    tables = {size: Rows(runs) for size in sizes}
    for round_ in Rows(runs).rounds():
        for size, rows in tables.items():
            if round_ == 0 and size > MOST_IN_WARM_UP:
                continue
            began_s = time.perf_counter()
            job.run_floor(size)
            rows.add(job.floor(size), time.perf_counter() - began_s, round_)
            for way in ways:
                for stage, seconds in run_job(bench, job, size, way).items():
                    rows.add(f"{way}, {stage}", seconds, round_)
            if job.torchrun is not None and size == 2:
                rows.add("torchrun, first line", run_torchrun(bench, job.torchrun), round_)
    for size, rows in tables.items():
        print(f"\n## Connect, {named(size)}: {job.title}\n{rows.table('s', {}, ratio_to=job.floor(size))}", flush=True)


def run_job(bench: Bench, job: Job, size: int, way: TransportName) -> dict[str, float]:
    """Runs a job to its end; returns when it had come how far, in seconds from its start."""
    logs = bench.new_folder()
    words = [sys.executable, "-m", "dsrun", "run", "-H", str(bench.listed), "--nodes", str(size), "--transport", way]
    words += ["--ssh-config", str(bench.rig.ssh_config), "--log-dir", str(logs), *job.words]
    came: dict[str, float] = {}
    said = b""
    began_s, began_epoch_s = time.perf_counter(), time.time()
    with running(words, bench.folder, bench.env) as process:
        while data := read(process):
            said += data
            for stage, text in NOTES.items():
                if stage not in came and text in said:
                    came[stage] = time.perf_counter() - began_s
        code = process.wait(LIMIT_S)
        whole_s = time.perf_counter() - began_s
    assert code == 0, f"{words} exited with {code}:\n{said.decode(errors='replace')}"
    assert len(came) == len(NOTES), f"{words} did not say all of {list(NOTES)}:\n{said.decode(errors='replace')}"
    (events_file,) = logs.glob("*/events.jsonl")
    events: list[dict[str, Any]] = [json.loads(line) for line in events_file.read_text().splitlines()]
    started = [event["time"] - began_epoch_s for event in events if event["event"] == "rank_started"]
    assert len(started) == size, f"{len(started)} of {size} ranks have started"
    first_line_s = came.pop("first line")
    return {**came, "last rank started": max(started), "first line": first_line_s, "whole run": whole_s}


def run_torchrun(bench: Bench, script: Sequence[str]) -> float:
    """Runs torchrun on the first two hosts at once; returns the seconds to the first line of rank 0."""
    pair = bench.rig.hosts[:2]
    # Hosts have all ports for themselves.
    meet = ("--nnodes=2", "--nproc-per-node=1", f"--master-addr={pair[0].address}", "--master-port=29500")
    torchrun = ("env", "-C", str(bench.folder), sys.executable, "-m", "torch.distributed.run", *meet)
    began_s = time.perf_counter()
    with ExitStack() as stack:
        first, other = (
            stack.enter_context(
                running([*host.enter, *torchrun, f"--node-rank={rank}", *script], bench.folder, bench.env)
            )
            for rank, host in enumerate(pair)
        )
        said = b""
        while FIRST_LINE not in said:
            data = read(first)
            assert data, f"torchrun has not come so far:\n{said.decode(errors='replace')}"
            said += data
        first_line_s = time.perf_counter() - began_s
        for process in (first, other):
            while read(process):
                pass
            assert process.wait(LIMIT_S) == 0, f"torchrun exited with {process.returncode}"
    return first_line_s


# Preflight


def preflight(bench: Bench, sizes: Sequence[int], ways: Sequence[TransportName], runs: int) -> None:
    """Times preflight on each number of hosts, and prints a table for each."""
    tables = {size: Rows(runs) for size in sizes}
    for round_ in Rows(runs).rounds():
        for size, way in itertools.product(sizes, ways):
            if round_ == 0 and size > MOST_IN_WARM_UP:
                continue
            script = str(Path(__file__).with_name("preflight_once.py"))
            words = [sys.executable, script, way, str(size), str(bench.listed), str(bench.rig.ssh_config)]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, timeout=LIMIT_S)
            for part, seconds in json.loads(done.stdout).items():
                tables[size].add(f"{way}, {part}", seconds, round_)
    for size, rows in tables.items():
        bars = {f"{way}, whole": [Bar(BAR_S)] for way in ways} if size == BAR_HOSTS else {}
        print(f"\n## Preflight, {named(size)}\n{rows.table('s', bars)}", flush=True)


# Bytes


def count_bytes(bench: Bench, sizes: Sequence[int], ways: Sequence[TransportName], runs: int) -> None:
    """Counts the bytes of whole jobs, and prints a table for each number of hosts and way to them."""
    reach = ReachSettings(lease_s=DEFAULT_LEASE_S, ssh_config=bench.rig.ssh_config)
    columns = ("to the host, channel", "from it, channel", "to the host, wire", "from it, wire")
    for size, way in itertools.product(sizes, ways):
        measured = [
            channel_bytes.measure(
                bench.hosts(size),
                make_transport(way, reach),
                device=bench.rig.front.device,
                folder=bench.new_folder(),
            )
            for _ in range(runs)
        ]
        lines = [f"| {' | '.join(('bytes, by host', *columns))} |", f"|{'---|' * (1 + len(columns))}"]
        for phase in measured[0]:
            by_column = zip(*(astuple(job[phase]) for job in measured), strict=True)
            lines.append(f"| {' | '.join((phase, *map(spread, by_column)))} |")
        print(f"\n## Bytes, {named(size)} by {way}\n" + "\n".join(lines), flush=True)


def spread(values: Sequence[float]) -> str:
    """Returns the median, with least and most where they differ."""
    least, median, most = (f"{value:,.0f}" for value in (min(values), statistics.median(values), max(values)))
    return median if least == most else f"{median} ({least} to {most})"


def named(size: int) -> str:
    """Returns a number of hosts in words."""
    return "1 host" if size == 1 else f"{size} hosts"


def main() -> None:
    """Makes the hosts, runs the sections and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="rounds that count")
    parser.add_argument("--byte-runs", type=int, default=1, help="jobs whose bytes are counted, each")
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 4, 16, 64], help="for a program that prints a word")
    parser.add_argument("--torch-hosts", type=int, nargs="*", default=[1, 2, 4], help="for a script with torch")
    parser.add_argument("--preflight-hosts", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--byte-hosts", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="transports")
    parser.add_argument("--skip", nargs="*", default=[], choices=SECTIONS, help="sections to leave out")
    args = parser.parse_args()
    why_not = why_no_hosts()
    if why_not is not None:
        parser.exit(1, f"{parser.prog}: {why_not}\n")
    began_s = time.perf_counter()
    needed = {
        "connect": [*args.hosts, *args.torch_hosts],
        "preflight": args.preflight_hosts,
        "bytes": args.byte_hosts,
    }
    count = max(size for section in SECTIONS if section not in args.skip for size in needed[section])
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {args.runs} rounds", flush=True)
    with tempfile.TemporaryDirectory() as name, made_hosts(count, Path(name)) as rig:
        introduce(rig)
        quieten_shells(rig)
        print(f"{named(count)} of namespaces, each with an sshd, made in {time.perf_counter() - began_s:.1f} s")
        bench = Bench(rig, hostfile(rig), rig.folder)
        if "connect" not in args.skip:
            for job, sizes in zip(jobs(bench), (args.hosts, args.torch_hosts), strict=True):
                connect(bench, job, sizes, args.ways, args.runs)
        if "preflight" not in args.skip:
            preflight(bench, args.preflight_hosts, args.ways, args.runs)
        if "bytes" not in args.skip:
            count_bytes(bench, args.byte_hosts, args.ways, args.byte_runs)
    print(f"\n{time.perf_counter() - began_s:.0f} s in all")


if __name__ == "__main__":
    main()
