"""Which scheduler's job this process runs in, and which hosts a job of dsrun takes there. Starts and asks nothing.

A scheduler is a module beside this one and a row: in `NODE_LISTS` where it leaves its jobs a list of hosts, which are
then reached over ssh, else in `find_job`.

[Note: who takes the hosts] The hosts of a job are taken by its script, or its shell: the process that the scheduler has
started on the first of them, or on a launch host beside them. A dsrun that runs on another of the hosts, or as one task
of several, was started there by somebody who wants it there: it takes its own machine, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from dsrun.contract.environment import JOB_ID_ENV

from ..hosts.spec import HostSpec
from . import slurm
from .node_lists import NODE_LISTS, NodeList, UnreadableList

_ALONE = "ranks run on this machine alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerJob:
    """A scheduler's job around this process.

    Attributes:
        name: `PBS job 123`.
        hosts: those to take, in its order; empty for this machine alone.
        way: way to reach the hosts, `srun` or `ssh`, unless the user says otherwise.
        counts_gpus: slots are the GPUs that the job has on each host, where it has any.
        here: name of the host that is this machine; None where it is none of them, or a step is started there too.
        remark: remark that users must know about the hosts taken; None for none.
    """

    name: str
    hosts: tuple[HostSpec, ...]
    way: Literal["srun", "ssh"]
    counts_gpus: bool
    here: str | None = None
    remark: str | None = None


def find_job(environ: Mapping[str, str], *, local_names: Collection[str]) -> SchedulerJob | None:
    """Returns the job around this process.

    Args:
        environ: environment variables of this process.
        local_names: names of this machine, in lower case, also without its domain.

    Returns:
        None outside of one, in a rank of dsrun, and in a job of this machine alone.

    Raises:
        HostfileError: what the scheduler says makes no sense, or makes a job that dsrun cannot serve.
    """
    if JOB_ID_ENV in environ and not slurm.is_batch_script(environ):
        return None
    if slurm.job_id(environ) is not None:
        hosts = slurm.read_allocation(environ)
        return None if hosts is None else SchedulerJob(name=hosts[0].source, hosts=hosts, way="srun", counts_gpus=True)
    for known in NODE_LISTS:
        if (name := known.job_of(environ)) is not None:
            return _of_list(known, name, environ, local_names)
    if "FLUX_URI" in environ and "FLUX_TASK_RANK" not in environ:
        # A batch script or shell of `flux batch` and `flux alloc` has no other variable.
        words = "flux hostlist -e -d '\\n' local | dsrun -H - -n N"
        remark = f"Flux tells the hosts of a job to those who ask: {_ALONE}; `{words} ...` takes all of them"
        return SchedulerJob(name="Flux job", hosts=(), way="ssh", counts_gpus=False, remark=remark)
    return None


def _of_list(
    known: NodeList, name: str, environ: Mapping[str, str], local_names: Collection[str]
) -> SchedulerJob | None:
    def alone(reason: str, words: str) -> SchedulerJob:
        remark = f"{name}: {reason}: {_ALONE}; `dsrun {words} ...` names the hosts"
        return SchedulerJob(name=name, hosts=(), way="ssh", counts_gpus=False, remark=remark)

    try:
        hosts = known.read(environ)
    except UnreadableList as error:
        return alone(str(error), "-H FILE")
    here = [index for index, host in enumerate(hosts) if host.name.lower().partition(".")[0] in local_names]
    if len(hosts) == 1 and here:
        return None
    if len(hosts) == 1 and not known.has_launch_host(environ):
        return alone(f"its host is called {hosts[0].name}, and this machine is not", "-H FILE")
    if known.is_task(environ) or (here and here[0] != 0):
        return alone(f"it has {len(hosts)} hosts, and dsrun was not started by its script", known.hostfile)
    remark = None if here else f"{name}: this machine has the name of none of its hosts: all are reached over ssh"
    local = hosts[here[0]].name if here else None
    return SchedulerJob(name=name, hosts=hosts, way="ssh", counts_gpus=False, here=local, remark=remark)
