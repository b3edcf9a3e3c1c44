"""Jobs over the hosts of a rig, started as people start them: `dsrun -H hosts ...` as a process, over ssh."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.cli import Result, clean_environment, run_dsrun, start_dsrun
from support.namespaces import Rig

#: A hostfile names hosts as /etc/hosts of the hosts does; this machine's is not touched, so they carry their addresses.
_LINE = "{name} slots={slots} addr={address}"


def hostfile(rig: Rig, *, slots: int | Sequence[int] = 1, more: Sequence[str] = (), name: str = "hosts") -> Path:
    """Writes the hosts of a rig down.

    Args:
        rig: the hosts.
        slots: of each host, or of all.
        more: of each host, what else its line says.
        name: of the file.
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
        words: see `words_on_hosts`.
        cwd: where dsrun is started.
        hosts: see `words_on_hosts`.
        timeout_s: longest life of it.
        env: changes of the front end's environment.
    """
    return run_dsrun(
        *words_on_hosts(rig, *words, hosts=hosts), cwd=cwd, env=environment(rig, **env), timeout_s=timeout_s
    )


@contextmanager
def started_on_hosts(
    rig: Rig, *words: str | bytes, cwd: Path, hosts: Path | None = None, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A job over the hosts of a rig, while it runs; killed at the end of the block if it still does."""
    with start_dsrun(*words_on_hosts(rig, *words, hosts=hosts), cwd=cwd, env=environment(rig, **env)) as process:
        try:
            yield process
        finally:
            process.kill()
