"""Jobs over the hosts of a rig, started as people start them: `dsrun -H hosts ...` as a process, over ssh."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support import traces
from support.cli import Result, clean_environment, run_dsrun, start_dsrun
from support.faults import CLEAN_S, Job, launched
from support.namespaces import NetHost, Rig
from support.processes import wait_for_end

#: A hostfile names hosts as /etc/hosts of the hosts does; this machine's is not touched, so they carry their addresses.
_LINE = "{name} slots={slots} addr={address}"
#: Prints what a job may not leave on a host: files where all may write, and where somebody listens who is not its ssh
#: server. For the folder that torch makes, see `Places.left`.
_LOOK_AROUND = """
find /dev/shm /tmp -xdev -mindepth 1 -not -path '/tmp/torchinductor_*'
cat /proc/net/tcp* | awk '$4 == "0A" && $2 !~ /:0016$/ {print "tcp", $2}'
awk '$4 == "00010000" {print "unix", $7, $8}' /proc/net/unix
"""


def hostfile(rig: Rig, *, slots: int | Sequence[int] = 1, more: Sequence[str] = (), name: str = "hosts") -> Path:
    """Writes the hosts of a rig down.

    Args:
        rig: the hosts.
        slots: number of slots of each host, or one number for all.
        more: further words for the line of each host; empty for none.
        name: name of the hostfile.
    """
    counts = [slots] * len(rig.hosts) if isinstance(slots, int) else list(slots)
    ends = [f" {words}" for words in more] or [""] * len(rig.hosts)
    lines = [
        _LINE.format(name=host.name, slots=count, address=host.address) + end
        for host, count, end in zip(rig.hosts, counts, ends, strict=True)
    ]
    path = rig.folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def environment(rig: Rig, **changes: str) -> dict[str, str]:
    """The front end's: jobs are kept in the rig's folder."""
    return clean_environment(XDG_STATE_HOME=str(rig.folder / "state"), CUDA_VISIBLE_DEVICES="", **changes)


def words_on_hosts(rig: Rig, *words: str | bytes, hosts: Path | None = None) -> list[str | bytes]:
    """Returns the words after `dsrun` for a job over the hosts of a rig.

    Args:
        rig: the hosts.
        words: more words: options, the script and its own.
        hosts: the hostfile; all hosts with one slot each if None.
    """
    return ["-H", str(hosts or hostfile(rig)), "--ssh-config", str(rig.ssh_config), *words]


def run_on_hosts(
    rig: Rig, *words: str | bytes, cwd: Path, hosts: Path | None = None, timeout_s: float = 90, **env: str
) -> Result:
    """Runs a job over the hosts of a rig to its end.

    Args:
        rig: the hosts.
        words: words after the options about hosts: options, the script and its own words; see `words_on_hosts`.
        cwd: folder in which dsrun is started.
        hosts: path of the hostfile; None for all hosts of the rig with one slot each. See `words_on_hosts`.
        timeout_s: longest life of it.
        env: changes to the environment variables of the front end.
    """
    return run_dsrun(
        *words_on_hosts(rig, *words, hosts=hosts), cwd=cwd, env=environment(rig, **env), timeout_s=timeout_s
    )


@contextmanager
def started_on_hosts(
    rig: Rig, *words: str | bytes, cwd: Path, hosts: Path | None = None, **env: str
) -> Generator[subprocess.Popen[bytes]]:
    """A job over the hosts of a rig, while it runs; killed at the end of the block if it still does."""
    with start_dsrun(*words_on_hosts(rig, *words, hosts=hosts), cwd=cwd, env=environment(rig, **env)) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def launched_on_hosts(
    rig: Rig,
    folder: Path,
    program: str,
    *args: str,
    hosts: Path | None = None,
    ssh_config: Path | None = None,
    words: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    grace_s: float = 2.0,
) -> Generator[Job]:
    """Runs `dsrun -H hosts ARGS train.py WORDS`, and holds it against the oracle here and on every host of the rig.

    A host may have no process more than before, whatever it is, but for those of its ssh server; no file more in
    /dev/shm and /tmp; and nobody may listen who did not before. See [Note: oracle] in support.faults.

    Args:
        rig: the hosts.
        folder: folder of this launch, below the folder of the rig.
        program: source of train.py.
        args: options of dsrun.
        hosts: path of the hostfile; None for all hosts of the rig with one slot each. See `words_on_hosts`.
        ssh_config: the rig's if None.
        words: the script's.
        env: extra environment variables; a value of None takes a variable away. See `launched`.
        grace_s: seconds of grace, passed to dsrun as `--grace` and allowed by the oracle; see `launched`.
    """
    before = {host.name: processes_of(host) | left_on(host) for host in rig.hosts}
    reach = ["-H", str(hosts or hostfile(rig)), "--ssh-config", str(ssh_config or rig.ssh_config)]
    with launched(folder, program, *reach, *args, words=words, env=env, grace_s=grace_s) as job:
        yield job
        job.end()
        deadline_s = time.monotonic() + CLEAN_S + grace_s
        for host in rig.hosts:
            while more := processes_of(host) - before[host.name]:
                over = [wait_for_end(_pid(process), timeout_s=deadline_s - time.monotonic()) for process in more]
                assert all(over), f"left on {host.name}: {sorted(more)}\n{job.said()}"
            left = left_on(host) - before[host.name]
            assert not left, f"left on {host.name}: {sorted(left)}\n{job.said()}"


def processes_of(host: NetHost) -> set[str]:
    """Every live process of a host but its ssh servers, as `PID WORDS` with this machine's pid."""
    theirs = host.run("readlink", "/proc/1/ns/pid").strip()
    found = {pid for pid in traces.pids() if traces.namespace_of(pid, "pid") == theirs}
    words = {pid: b" ".join(traces.words_of(pid)).decode(errors="replace") for pid in found}
    return {f"{pid} {text}" for pid, text in words.items() if text and "sshd" not in text.split()[0]}


def pids_of(host: NetHost, module: str) -> list[int]:
    """This machine's pids of the processes of a host that run one of `process_modules`."""
    return sorted(_pid(process) for process in processes_of(host) if f"{module} " in process)


def left_on(host: NetHost) -> set[str]:
    """What there is on a host of the kinds of thing that a job may not leave."""
    return set(host.run("sh", "-c", _LOOK_AROUND).splitlines())


def _pid(process: str) -> int:
    return int(process.partition(" ")[0])
