"""How many bytes a second go from ranks through agent, front end and console, and how large the front end grows.

    python scripts/bench/log_throughput.py [--mib 200] [--runs 3] [--case many]

Each run is a whole job by the wall clock, `dsrun` on a pipe or into a file. The seconds of a job that prints nothing
are measured first and taken off. What the logs hold is compared with what was written, byte for byte, and the lines on
the console are counted. Then the logs are read back as `dsrun logs` does. Prints a Markdown table of medians with least
and most. Writers take a core of their own; on a machine with two, everything shares. The front end's own seconds of CPU
for 100 MB say how fast it could be at most, and mean something on a busy machine too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.logs.files import older_parts
from dsrun.launcher.logs.reader import read_lines, read_log

WRITER = """
import os, sys
block, size = open(sys.argv[1], 'rb').read(), int(sys.argv[2])
out = os.open('/dev/stdout', os.O_WRONLY)
while size:
    size -= os.write(out, block[: size] if size < len(block) else block)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """What ranks write: `block`, again and again."""

    name: str
    ranks: int
    block: bytes
    to_file: bool = False


def numbered_lines(length: int) -> bytes:
    """About 1 MiB of lines that all differ, of so many bytes each."""
    return b"".join(b"%0*d\n" % (length - 1, number) for number in range((1 << 20) // length))


ODD = b"nul \0 bad \xff\xfe half \xc3 bar 1%\r2%\r3%\n" + "zwölf 進捗 🙂\n".encode()
CASES = {
    "one": Case("1 rank, lines of 100 bytes, pipe", 1, numbered_lines(100)),
    "file": Case("1 rank, lines of 100 bytes, file", 1, numbered_lines(100), to_file=True),
    "many": Case("8 ranks, lines of 100 bytes, pipe", 8, numbered_lines(100)),
    "short": Case("2 ranks, lines of 20 bytes, pipe", 2, numbered_lines(20)),
    "long": Case("1 rank, lines of 1 MB, pipe", 1, (b"x" * 999_999 + b"\n")),
    "odd": Case("1 rank, NUL, invalid UTF-8, bars, emoji, pipe", 1, ODD * 20_000),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What one job took."""

    seconds: float
    peak_mib: float
    cpu_s: float
    console_lines: int
    folder: Path


def run_job(folder: Path, case: Case, each: int) -> Run:
    """Runs a job whose ranks write `each` bytes, and reads what it prints."""
    block, writer = folder / "block", folder / "writer.py"
    block.write_bytes(case.block)
    writer.write_text(WRITER)
    words = ["-n", str(case.ranks), "--no-python", "--log-dir", str(folder), sys.executable, "-S", str(writer)]
    command = [sys.executable, "-m", "dsrun", "run", *words, str(block), str(each)]
    started = time.perf_counter()
    target = (folder / "console").open("w+b") if case.to_file else None
    process = subprocess.Popen(
        command, stdout=target or subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    lines, peak, cpu_s = 0, 0.0, 0.0
    if process.stdout is not None:
        looked = 0.0
        while data := os.read(process.stdout.fileno(), 1 << 20):
            lines += data.count(b"\n")
            if time.perf_counter() - looked > 0.05:
                looked = time.perf_counter()
                peak, cpu_s = max(peak, peak_mib(process.pid)), max(cpu_s, cpu_seconds(process.pid))
    while process.poll() is None:
        peak, cpu_s = max(peak, peak_mib(process.pid)), max(cpu_s, cpu_seconds(process.pid))
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    assert process.returncode == 0, f"{case.name}: dsrun exited with {process.returncode}"
    if target is not None:
        target.seek(0)
        lines = sum(piece.count(b"\n") for piece in iter(lambda: target.read(1 << 20), b""))
        target.close()
    (job,) = [path for path in folder.iterdir() if path.is_dir()]
    return Run(seconds, peak, cpu_s, lines, job)


def peak_mib(pid: int) -> float:
    """The most memory a process has had resident so far."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) / 1024 if match else 0.0


def cpu_seconds(pid: int) -> float:
    """What a process itself has used so far, its children not counted."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # utime and stime, the fields 14 and 15.
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def check(run: Run, case: Case, each: int) -> None:
    """Compares the logs with what the ranks wrote, and the console with the number of their lines."""
    full, rest = divmod(each, len(case.block))
    wanted = hashlib.sha256()
    for _ in range(full):
        wanted.update(case.block)
    wanted.update(case.block[:rest])
    for rank in range(case.ranks):
        found = hashlib.sha256()
        for path in [*older_parts(run.folder, rank), JobPaths(run.folder).log(rank)]:
            with path.open("rb") as file:
                for piece in iter(lambda: file.read(1 << 20), b""):
                    found.update(piece)
        assert found.digest() == wanted.digest(), f"{case.name}: the log of rank {rank} is not what it wrote"
    ends = full * case.block.count(b"\n") + case.block[:rest].count(b"\n") + (not case.block[:rest].endswith(b"\n"))
    if case.ranks == 1:
        # Of several ranks' lines, those that are the same may have become one.
        assert run.console_lines >= ends - (rest == 0), f"{case.name}: {run.console_lines} of {ends} lines were shown"


def read_back(folder: Path) -> tuple[float, float]:
    """Seconds to read a job's lines in bunches, and one by one."""
    started = time.perf_counter()
    for _ in read_lines(folder):
        pass
    middle = time.perf_counter()
    for _ in read_log(folder):
        pass
    return middle - started, time.perf_counter() - middle


def shown(values: list[float], digits: int = 0) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Runs the cases in turn and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=200, help="bytes of all ranks together")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    args = parser.parse_args()
    cases = list(CASES.values()) if args.case == "all" else [CASES[args.case]]
    print(f"{args.mib} MiB in all, {args.runs} runs, {os.cpu_count()} cores\n")
    head = ["case", "MB/s", "front end, CPU s for 100 MB", "front end, peak MiB"]
    print(f"| {' | '.join([*head, 'read in bunches, MB/s', 'read line by line, MB/s'])} |\n|{'---|' * 6}")
    for case in cases:
        each = (args.mib << 20) // case.ranks
        rates: list[float] = []
        peaks: list[float] = []
        costs: list[float] = []
        reads: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.runs):
            with tempfile.TemporaryDirectory() as name:
                empty = run_job(Path(name), case, 0)
            with tempfile.TemporaryDirectory() as name:
                run = run_job(Path(name), case, each)
                check(run, case, each)
                total_mb = each * case.ranks / 1e6
                rates.append(total_mb / (run.seconds - empty.seconds))
                costs.append((run.cpu_s - empty.cpu_s) / total_mb * 100)
                peaks.append(run.peak_mib)
                for kept, seconds in zip(reads, read_back(run.folder), strict=True):
                    kept.append(total_mb / seconds)
        cells = [case.name, shown(rates), shown(costs, 2), shown(peaks), *map(shown, reads)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
