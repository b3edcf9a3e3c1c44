"""Checks of this machine that matter before a job: each looks at one thing and says what it found, and a way out.

Nothing is changed; the trial job runs in a folder of its own that is gone afterwards. What the checks look at is given
to them, so each verdict can be tested; `examine` asks the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dsrun.contract.environment import JOB_ID_ENV
from dsrun.errors import DsrunError
from dsrun.units import format_bytes, format_duration, format_list

from ..isolated_command import isolated_command
from ..jobs.folder import jobs_folder
from ..jobs.listing import JobState, all_jobs
from ..machine.gpus.read import Gpu
from ..machine.limits import LimitsReport
from ..machine.memory import MemoryReport
from ..machine.read import probe
from ..machine.report import ProbeReport
from ..machine.storage import room_of
from ..machine.verdict import Context, ProbeVerdict
from ..machine.verdicts.all import fit_of
from ..machine.verdicts.gpus import gpu_verdicts
from ..machine.verdicts.limits import locked_memory_verdicts, open_files_verdicts, shared_memory_verdicts
from ..machine.verdicts.no_gpus import hidden_gpu_verdicts, no_gpu_verdicts
from ..machine.verdicts.room import fault_text
from ..machine.verdicts.torch_build import torch_verdicts

#: `green`: as it should be; `amber`: a job may run, but worse or not at scale; `red`: jobs fail.
Verdict = Literal["green", "amber", "red"]

#: For the trial job, which takes a second or two on an idle machine.
TRIAL_PATIENCE_S = 60.0
_SLOW_TRIAL_S = 10.0
#: Named one by one.
_MOST_JOBS = 3
_MOST_FAULTS = 2
#: Before this nobody could have installed this version.
_RELEASED_S = 1_767_225_600  # 2026-01-01

_TRIAL_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == dist.get_world_size() == 2
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        name: name of what was looked at, `torch` for example.
        verdict: verdict on what was looked at: `green`, `amber` or `red`.
        text: sentence about what was found.
        fix: the way out; None for green.
    """

    name: str
    verdict: Verdict
    text: str
    fix: str | None = None


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Runs every check on this machine.

    Args:
        environ: the environment jobs would be started in.
    """
    report = probe(environ=environ)
    return [
        *check_torch(report),
        *check_gpus(report),
        check_trial(environ),
        check_shared_memory(report.memory),
        check_locked_memory(report.host.limits, has_cards=any(card.works for card in report.rdma)),
        check_open_files(report.host.limits),
        check_state_folder(environ),
        check_crashed_jobs(environ),
        check_ssh(shutil.which("ssh", path=environ.get("PATH"))),
        check_clock(time.time()),
    ]


def check_torch(report: ProbeReport) -> list[Finding]:
    """Looks for torch, and whether the driver can run what it was built for."""
    versions = report.versions
    context = Context(trains=True)
    verdicts = list(torch_verdicts(versions, gpus=report.gpus_usable, fit=fit_of(report), context=context))
    python = f"Python {versions.python} at {versions.python_path}"
    missing = [verdict for verdict in verdicts if verdict.path == "versions.torch"]
    found = _judged("torch", missing, well=f"torch {versions.torch}, {python}")
    return [found] if missing else [found, _check_cuda(report, verdicts)]


def _check_cuda(report: ProbeReport, verdicts: Sequence[ProbeVerdict]) -> Finding:
    """Looks whether jobs have GPUs to train on, and a torch for them.

    Args:
        report: probe report of this machine.
        verdicts: verdicts on the torch of this machine.
    """
    unusable, gpus = report.gpus_unusable, len(report.gpus)
    without = [
        *no_gpu_verdicts(unusable, report.gpus_idle, context=Context(trains=True)),
        *hidden_gpu_verdicts(
            gpus=gpus, usable=report.gpus_usable, variables=report.software.variables, unusable=unusable
        ),
    ]
    if without or not gpus:
        return _judged("CUDA", without, well="no GPU here: jobs train on the CPU")
    fit = fit_of(report)
    return _judged("CUDA", verdicts, well="" if fit is None else fit.text)


#: What `CUDA` says already: that jobs have no GPU, and why.
_OF_CUDA = frozenset({"gpus_unusable.text", "gpus_idle", "gpus_usable"})


def check_gpus(report: ProbeReport) -> list[Finding]:
    """Looks for what is wrong with GPUs and what connects them; of a machine without any there is nothing to say."""
    if not report.gpus:
        return []
    wrong = [found for found in gpu_verdicts(report) if found.level != "note" and found.path not in _OF_CUDA]
    wrong.sort(key=lambda found: found.level != "red")
    if not wrong:
        return [Finding(name="GPUs", verdict="green", text=_count(report.gpus))]
    worst = [found for found in wrong if found.level == wrong[0].level]
    text = "; ".join(found.text for found in worst[:_MOST_FAULTS])
    more = len(wrong) - len(worst[:_MOST_FAULTS])
    text += f" (and {more} more: `dsrun probe`)" if more else ""
    verdict: Verdict = "red" if wrong[0].level == "red" else "amber"
    return [Finding(name="GPUs", verdict=verdict, text=text, fix=worst[0].fix)]


def _count(gpus: Sequence[Gpu]) -> str:
    return "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"


def check_trial(environ: Mapping[str, str], *, python: str = sys.executable) -> Finding:
    """Runs a job of two ranks that all-reduce over Gloo, as a user would.

    Args:
        environ: the environment of the job.
        python: the interpreter of the job.
    """
    with tempfile.TemporaryDirectory(prefix="dsrun-doctor-") as name:
        folder = Path(name)
        (folder / "trial.py").write_text(_TRIAL_SCRIPT)
        words = ["run", "-q", "-n", "2", "--backend", "gloo", "--start", "fork", "--no-plan", "trial.py"]
        began_s = time.monotonic()
        try:
            done = subprocess.run(
                [*isolated_command(python, "dsrun.__main__", *words)],
                cwd=folder,
                env={**environ, "XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TRIAL_PATIENCE_S,
            )
        except subprocess.TimeoutExpired:
            text = f"two ranks did not meet within {format_duration(TRIAL_PATIENCE_S)}"
            fix = "is 127.0.0.1 up (`ip addr show lo`), and no firewall rule on it?"
            return Finding(name="trial job", verdict="red", text=text, fix=fix)
        took_s = time.monotonic() - began_s
    if done.returncode != 0:
        said = os.fsdecode(done.stderr).strip().splitlines() or ["it said nothing"]
        return Finding(name="trial job", verdict="red", text=f"exit code {done.returncode}: {said[0]}", fix=said[-1])
    text = f"two ranks all-reduced over Gloo in {format_duration(took_s)}"
    if took_s > _SLOW_TRIAL_S:
        fix = "importing torch takes that long: is the environment on a slow or shared disk, or the machine busy?"
        return Finding(name="trial job", verdict="amber", text=text, fix=fix)
    return Finding(name="trial job", verdict="green", text=text)


def check_shared_memory(memory: MemoryReport) -> Finding:
    """Looks at /dev/shm, through which data loaders and ranks of one host exchange tensors."""
    return _judged("/dev/shm", shared_memory_verdicts(memory), well=format_bytes(memory.shm_total_bytes or 0))


def check_locked_memory(limits: LimitsReport | None, *, has_cards: bool) -> Finding:
    """Looks at what may be locked; jobs of this machine alone take no RDMA."""
    verdicts = locked_memory_verdicts(limits, has_cards=has_cards, context=Context(is_here=True))
    well = "unknown" if limits is None else _limit(limits.lockable_bytes, format_bytes)
    return _judged("memlock", verdicts, well=well)


def check_open_files(limits: LimitsReport | None) -> Finding:
    """Looks at how many files a process may have open."""
    well = "unknown" if limits is None else _limit(limits.nofile, str)
    return _judged("nofile", open_files_verdicts(limits), well=well)


def _limit(limit: int | None, show: Callable[[int], str]) -> str:
    return "unlimited" if limit is None else show(limit)


def _judged(name: str, verdicts: Iterable[ProbeVerdict], *, well: str) -> Finding:
    """Returns the worst of what the rules say, or what is to be said where they have nothing to say.

    Args:
        name: name of what was looked at, `torch` for example.
        verdicts: verdicts of the rules, the worst first.
        well: text for the case that all is as it should be.
    """
    worst = next(iter(verdicts), None)
    if worst is None or worst.level == "note":
        return Finding(name=name, verdict="green", text=well)
    return Finding(name=name, verdict=worst.level, text=worst.text, fix=worst.fix)


def check_state_folder(environ: Mapping[str, str]) -> Finding:
    """Looks whether jobs can be written down, and whether others could write there."""
    try:
        folder = jobs_folder(environ)
    except DsrunError as error:
        return Finding(name="state folder", verdict="red", text=str(error), fix=error.hint)
    room = room_of(str(folder))
    if room.fault is None and not _takes_files(Path(room.there)):
        room = replace(room, fault="takes no file")
    if room.fault is not None:
        fix = "set XDG_STATE_HOME to a folder of yours, or use `--log-dir DIR`"
        return Finding(name="state folder", verdict="red", text=fault_text(room), fix=fix)
    if room.there == room.path and folder.stat().st_mode & 0o022:
        return Finding(
            name="state folder", verdict="amber", text=f"{folder}: others may write to it", fix=f"chmod 700 {folder}"
        )
    return Finding(name="state folder", verdict="green", text=str(folder))


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made there. Rights alone do not tell: a disk may be full, or its server refuse root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_crashed_jobs(environ: Mapping[str, str], *, proc: Path = Path("/proc")) -> Finding:
    """Looks for jobs whose front end was killed, and for processes of theirs that still live.

    Args:
        environ: environment variables; XDG_STATE_HOME or HOME says where the state folder is.
        proc: folder where the kernel shows processes, /proc.
    """
    try:
        crashed = [job.id for job in all_jobs(environ) if job.state is JobState.CRASHED]
    except DsrunError as error:
        return Finding(name="jobs", verdict="red", text=str(error), fix=error.hint)
    if not crashed:
        return Finding(name="jobs", verdict="green", text="none has crashed")
    found = processes_by_job(proc)
    left = {job_id: found[job_id] for job_id in crashed if job_id in found}
    if left:
        shown = ", ".join(f"{job_id} (pid {', '.join(map(str, pids))})" for job_id, pids in left.items())
        fix = f"`dsrun stop {' '.join(left)}` ends what is left"
        return Finding(name="jobs", verdict="amber", text=f"crashed, with processes left: {shown}", fix=fix)
    fix = f"`dsrun rm {' '.join(crashed[:_MOST_JOBS])}` forgets {'it' if len(crashed) == 1 else 'them'}"
    text = f"crashed, no process left: {format_list(crashed, _MOST_JOBS)}"
    return Finding(name="jobs", verdict="amber", text=text, fix=fix)


def processes_by_job(proc: Path) -> dict[str, list[int]]:
    """Returns the processes of this user that have a job's id in their environment, by that id.

    Args:
        proc: folder where the kernel shows processes, /proc; processes of other users cannot be read.
    """
    mark = f"{JOB_ID_ENV}=".encode()
    found: dict[str, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            if variable.startswith(mark):
                found.setdefault(os.fsdecode(variable[len(mark) :]), []).append(int(folder.name))
    return {job_id: sorted(pids) for job_id, pids in found.items()}


def check_ssh(path: str | None) -> Finding:
    """Looks for the client that reaches other hosts."""
    if path is None:
        fix = "install openssh-client"
        return Finding(name="ssh", verdict="amber", text="no client: jobs of this machine only", fix=fix)
    return Finding(name="ssh", verdict="green", text=path)


def check_clock(now_s: float) -> Finding:
    """Looks whether the clock can be right: certificates, file times and the order of failures go by it."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now_s))
    if now_s < _RELEASED_S:
        return Finding(name="clock", verdict="red", text=f"{shown} is long past", fix="`timedatectl set-ntp true`")
    return Finding(name="clock", verdict="green", text=shown)


def to_json(findings: Sequence[Finding]) -> str:
    """Returns what `dsrun doctor --json` prints."""
    checks = [
        {"name": found.name, "verdict": found.verdict, "text": found.text, "fix": found.fix} for found in findings
    ]
    return json.dumps({"schema_version": 1, "ok": is_well(findings), "checks": checks}, indent=2)


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether jobs can run."""
    return all(found.verdict != "red" for found in findings)
