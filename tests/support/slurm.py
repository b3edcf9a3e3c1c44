"""A Slurm cluster of two nodes on this machine, with daemons, keys and state of its own; gone with the test.

`python tests/support/slurm.py FOLDER` starts one to try things out: it prints the variable to export, and ends the
cluster when its stdin ends.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NODES = ("n1", "n2")
_DAEMONS = ("munged", "slurmctld", "slurmd")
_CLIENTS = ("sbatch", "salloc", "srun", "scancel", "scontrol", "sinfo")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_START_PATIENCE_S = 40.0
_END_PATIENCE_S = 20.0
_CORES = 8
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=20
GresTypes=gpu
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs={cores} RealMemory=1024 Gres=gpu:2
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""
#: A cluster without hardware: Slurm wants to see devices, which are never opened, and gives jobs their numbers.
_GPUS = ("gpu0", "gpu1")
#: All of it is below the first process of a namespace, with which the kernel ends everything. Whatever is orphaned
#: becomes a child of this process, which waits for none; the shell would. Words: folder, then commands, one a word.
_HOLDER = """
cd "$1"; shift
for daemon in "$@"; do sh -c "exec $daemon" </dev/null >>daemons.log 2>&1 & done
trap '' CHLD
echo ready
exec cat >/dev/null
"""


def why_no_slurm() -> str | None:
    """Why there can be no cluster here, for a test to be skipped with; None if there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster on this machine needs root"
    missing = [name for name in (*_DAEMONS, *_CLIENTS) if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"a Slurm cluster needs {', '.join(missing)}: apt-get install slurm-wlm munge"
    made = subprocess.run(["unshare", "-m", "-p", "-f", "true"], capture_output=True, text=True)
    if made.returncode:
        return f"no namespaces may be made here: {made.stderr.strip()}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            _make_device(Path(folder, "device"))
    except OSError as error:
        return f"no device files may be made here: {error.strerror}"
    return None


@dataclass(frozen=True, slots=True)
class Job:
    """What Slurm says of a job that has ended.

    Attributes:
        state: `COMPLETED`, `FAILED`, `CANCELLED`, ...
        exit_code: exit code of the job's script.
        signal: number of the signal that ended the job's script; 0 if none did.
    """

    state: str
    exit_code: int
    signal: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Two nodes, n1 and n2, that are this machine.

    Attributes:
        folder: folder that holds the cluster's files.
        environ: variables that lead Slurm's clients to it.
    """

    folder: Path
    environ: Mapping[str, str]

    def run(self, *words: str | Path) -> str:
        """Runs one of Slurm's clients; returns what it printed."""
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def wait_for(self, job_id: str, *, timeout_s: float = 60.0) -> Job:
        """Waits for a job and all its processes to end; returns what became of it."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            text = self.run("scontrol", "show", "job", "-o", job_id)
            fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
            if fields["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                code, _, signum = fields["ExitCode"].partition(":")
                return Job(fields["JobState"], int(code), int(signum))
            time.sleep(0.05)  # Slurm tells nobody: it has to be asked
        raise AssertionError(f"job {job_id} has not ended in {timeout_s} s: {self.log}")

    @contextmanager
    def allocation(self, *options: str) -> Generator[dict[str, str]]:
        """Holds an allocation of both nodes; yields the variables that `salloc` gives its shell."""
        said = subprocess.run(
            ["salloc", "--no-shell", f"--nodes={len(NODES)}", *options],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
        ).stderr
        found = re.search(r"Granted job allocation ([0-9]+)", said)
        assert found is not None, f"salloc grants nothing: {said}"
        try:
            yield {**self.environ, "SLURM_JOB_ID": found[1], "SLURM_JOB_NODELIST": "n[1-2]"}
        finally:
            self.run("scancel", found[1])

    @property
    def log(self) -> str:
        """What the daemons have said last."""
        texts = [path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)


@contextmanager
def cluster(folder: Path) -> Generator[Cluster]:
    """Starts a cluster, and takes it away with all that runs on it.

    Args:
        folder: an empty folder of the test's own, with a short path: it holds a socket.
    """
    config = folder / "slurm.conf"
    (folder / "munge").mkdir(mode=0o755)
    (folder / "state").mkdir(mode=0o700)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    for name in _GPUS:
        _make_device(folder / name)
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={folder / name}\n" for name in _GPUS))
    ctld_port, *ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().partition(".")[0]
    config.write_text(
        _CONFIG.format(
            folder=folder,
            host=host,
            ctld_port=ctld_port,
            ports=",".join(map(str, ports)),
            nodes=",".join(NODES),
            cores=_CORES,
        )
    )
    munge = folder / "munge"
    munged = f"munged --foreground --force --socket={munge}/socket --key-file={key} --log-file={munge}/log"
    daemons = [
        f"{munged} --pid-file={munge}/pid --seed-file={munge}/seed",
        f"slurmctld -D -f {config}",
        *(f"slurmd -D -N {node} -f {config}" for node in NODES),
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
    made = Cluster(folder, environ | {"PATH": _PATH, "SLURM_CONF": str(config)})
    with ExitStack() as stack:
        holder = subprocess.Popen(
            ["unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-ec", _HOLDER, "sh", folder, *daemons],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=made.environ,
        )
        stack.callback(_end, holder)
        assert holder.stdout is not None, "stdout is a pipe"
        assert holder.stdout.readline() == "ready\n", f"no namespaces could be made: {holder.wait()}"
        _wait_until_up(made)
        yield made


def _make_device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)


def _wait_until_up(made: Cluster) -> None:
    deadline_s = time.monotonic() + _START_PATIENCE_S
    seen = ""
    while time.monotonic() < deadline_s:
        asked = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T"], env=made.environ, capture_output=True, text=True, timeout=60
        )
        seen = asked.stdout + asked.stderr
        if asked.stdout.split("\n")[:-1] == [f"{node} idle" for node in NODES]:
            return
        time.sleep(0.05)
    raise AssertionError(f"the cluster does not come up: {seen}\n{made.log}")


def _end(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None, "stdin is a pipe"
    assert holder.stdout is not None, "stdout is a pipe"
    holder.stdin.close()
    holder.wait(_END_PATIENCE_S)
    holder.stdout.close()


def _free_ports(count: int) -> list[int]:
    """Returns ports that are free now; slurm.conf cannot say `any`."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [made.getsockname()[1] for made in sockets]


if __name__ == "__main__":
    with cluster(Path(sys.argv[1])) as started:
        print(f"export SLURM_CONF={started.environ['SLURM_CONF']}", flush=True)
        sys.stdin.read()
