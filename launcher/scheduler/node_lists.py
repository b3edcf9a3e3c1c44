"""Hosts of a job of PBS, LSF, Grid Engine, Cobalt or OAR: the list that each leaves its jobs -> hosts with slots.

Reads variables and the file that one names, and asks no daemon. Which of the hosts a job of dsrun takes, and when it
leaves the list alone, stands in registry.

[Note: slots of others] What these schedulers count on a host are processes or cores, as the job was asked for; none of
them says how many GPUs each host has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsrun.errors import HostfileError

from ..excerpts import Misread, quoted
from ..hosts.patterns import MAX_HOSTS, check_name, name_key
from ..hosts.spec import MAX_SLOTS, HostSpec
from ..os_errors import refusal_of

_WAY_OUT = "name the hosts yourself with `-H FILE`"
_MAX_BYTES = 4 << 20


class UnreadableList(Exception):
    """There is a job, and its list of hosts cannot be had; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeList:
    """Where one scheduler leaves the hosts of a job.

    Attributes:
        scheduler: its name.
        sign: variable that a job of it has.
        job_id: variable with the job's id.
        files: variables that may name the file; the first that is set counts.
        words: variable that holds host and slots by turns, read where there is no file.
        has_counts: a line of the file is a host, its slots and more; else a line is a slot.
        is_task: function that tells from the variables whether the scheduler started this process as one of several
            tasks of the job.
        has_launch_host: function that tells from the variables whether the first host only starts programs on the
            others.
        hostfile: words by which `dsrun` gets the same hosts named.
    """

    scheduler: str
    sign: str
    job_id: str
    files: tuple[str, ...]
    words: str | None = None
    has_counts: bool = False
    is_task: Callable[[Mapping[str, str]], bool] = lambda environ: False
    has_launch_host: Callable[[Mapping[str, str]], bool] = lambda environ: False
    hostfile: str

    def job_of(self, environ: Mapping[str, str]) -> str | None:
        """Returns what messages call the job around this process; None outside of one."""
        if not environ.get(self.sign):
            return None
        return f"{self.scheduler} job {environ.get(self.job_id) or '?'}"

    def read(self, environ: Mapping[str, str]) -> tuple[HostSpec, ...]:
        """Returns the hosts of the job, in its order, each once with its slots.

        Args:
            environ: environment variables of this process, with `sign` among them.

        Raises:
            UnreadableList: there is no list, or it cannot be read.
            HostfileError: the list makes no sense.
        """
        job = self.job_of(environ)
        place, counted = self._counted(environ)
        slots: Counter[str] = Counter()
        names: dict[str, str] = {}
        for line, name, count in counted:
            try:
                check_name(name)
                if count is None or not 0 < count <= MAX_SLOTS:
                    raise Misread(f"host `{name}` has no number of slots", "")
            except Misread as error:
                at = f", line {line}" if line else ""
                raise HostfileError(f"{job}: {place}{at}: {error.message}", hint=_WAY_OUT) from error
            names.setdefault(name_key(name), name)
            slots[name_key(name)] += count
            if len(names) > MAX_HOSTS:
                raise HostfileError(f"{job}: {place} names more than {MAX_HOSTS} hosts", hint=_WAY_OUT)
        if not names:
            raise UnreadableList(f"{place} names no host")
        if self.has_launch_host(environ) and len(names) > 1:
            names.pop(next(iter(names)))
        return tuple(
            HostSpec(name=name, slots=min(slots[key], MAX_SLOTS), source=str(job)) for key, name in names.items()
        )

    def _counted(self, environ: Mapping[str, str]) -> tuple[str, Iterator[tuple[int, str, int | None]]]:
        """Returns what the list is called, and line, host and slots of each of its entries."""
        variable = next((name for name in self.files if environ.get(name)), None)
        if variable is not None:
            path = environ[variable]
            return f"{variable} ({path})", self._lines(_read(Path(path), variable))
        words = environ.get(self.words or "", "").split()
        if self.words is None or not words:
            names = (*self.files, *((self.words,) if self.words else ()))
            raise UnreadableList(f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not set")
        if len(words) % 2:
            raise HostfileError(
                f"{self.job_of(environ)}: {self.words} is {quoted(' '.join(words))}; expected hosts and slots by turns",
                hint=_WAY_OUT,
            )
        return self.words, ((0, host, _count(slots)) for host, slots in zip(words[::2], words[1::2], strict=True))

    def _lines(self, text: str) -> Iterator[tuple[int, str, int | None]]:
        for number, line in enumerate(text.splitlines(), start=1):
            columns = line.split()
            if columns:
                yield number, columns[0], (_count(columns[1]) if columns[1:] else None) if self.has_counts else 1


def _read(path: Path, variable: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError as error:
        raise UnreadableList(f"{variable} cannot be read: {refusal_of(error)}") from error
    return data.decode("utf-8", "replace")


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else None


def _is_task_of_pbs(environ: Mapping[str, str]) -> bool:
    """Whether `pbsdsh` or the like started this process: the job's script is task 1 on its node 0."""
    return environ.get("PBS_NODENUM", "0").strip("0") != "" or environ.get("PBS_TASKNUM", "1").lstrip("0") != "1"


def _is_task_of_lsf(environ: Mapping[str, str]) -> bool:
    """Whether `blaunch` started this process on another host than the first; LSF counts its tasks from 1."""
    return environ.get("LSF_PM_TASKID", "1") not in ("0", "1")


#: A scheduler that leaves a list is a row here. Where several of them are there, the first counts.
NODE_LISTS = (
    NodeList(
        scheduler="PBS",
        sign="PBS_JOBID",
        job_id="PBS_JOBID",
        files=("PBS_NODEFILE",),
        is_task=_is_task_of_pbs,
        hostfile='-H "$PBS_NODEFILE" -n N',
    ),
    NodeList(
        scheduler="LSF",
        sign="LSB_JOBID",
        job_id="LSB_JOBID",
        files=("LSB_DJOB_HOSTFILE",),
        words="LSB_MCPU_HOSTS",
        is_task=_is_task_of_lsf,
        # On IBM's CSM clusters the script runs on a launch node, which stands first, and jsrun reaches the others.
        has_launch_host=lambda environ: "CSM_ALLOCATION_ID" in environ,
        hostfile='-H "$LSB_DJOB_HOSTFILE"',
    ),
    NodeList(
        scheduler="Grid Engine",
        sign="PE_HOSTFILE",
        job_id="JOB_ID",
        files=("PE_HOSTFILE",),
        has_counts=True,
        hostfile="-H FILE",
    ),
    NodeList(
        scheduler="Cobalt",
        sign="COBALT_NODEFILE",
        job_id="COBALT_JOBID",
        files=("COBALT_NODEFILE",),
        hostfile='-H "$COBALT_NODEFILE" -n N',
    ),
    NodeList(
        scheduler="OAR",
        sign="OAR_JOB_ID",
        job_id="OAR_JOB_ID",
        files=("OAR_NODEFILE", "OAR_NODE_FILE", "OAR_FILE_NODES"),
        hostfile='-H "$OAR_NODEFILE"',
    ),
)
