"""Names of a job's files and folders, and of dsrun's own folder of state: each is written here and nowhere else.

Launcher and ranks name their files alike. Makes, reads and lists nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: Logs of all ranks in a job's folder, older parts too.
LOG_PATTERN = "rank*.log"
_LOG_NAME = re.compile(r"rank([0-9]+)\.log")
#: Profiles of ranks in a job's folder.
TRACE_PATTERN = "rank*.trace.json.gz"
_TRACE_NAME = re.compile(r"rank([0-9]+)\.trace\.json\.gz")


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Paths in the folder of one job: the front end's, or a host's own where that cannot see the front end's.

    Attributes:
        folder: the job's folder.
    """

    folder: Path

    @property
    def record(self) -> Path:
        """What was asked for, see launcher/jobs/record.py."""
        return self.folder / "job.json"

    @property
    def outcome(self) -> Path:
        """How the job ended; missing while it runs."""
        return self.folder / "outcome.json"

    @property
    def config_copy(self) -> Path:
        """Copy of the training config, as it was checked."""
        return self.folder / "config.json"

    @property
    def machine(self) -> Path:
        """What the job depends on beside its command, see launcher/jobs/facts.py."""
        return self.folder / "machine.json"

    @property
    def lock(self) -> Path:
        """Lock that the front end holds as long as it lives."""
        return self.folder / "job.lock"

    @property
    def events(self) -> Path:
        """What happened to the job, one JSON object a line in order of time."""
        return self.folder / "events.jsonl"

    @property
    def live(self) -> Path:
        """How the ranks of a running job fare, see launcher/jobs/live_status.py."""
        return self.folder / "live.json"

    @property
    def live_draft(self) -> Path:
        """Next state of `live` while it is written."""
        return self.folder / ".live.json.new"

    @property
    def front_end_log(self) -> Path:
        """What a front end in the background says: notes, the report, and faults of its own."""
        return self.folder / "front_end.log"

    @property
    def output_index(self) -> Path:
        """Order in which the bytes of all ranks' logs arrived, see launcher/logs/output_index.py."""
        return self.folder / "output.index"

    @property
    def records(self) -> Path:
        """Records of the training, to which rank 0 of the runtime appends one JSON object a line.

        Each has `event`, `time` (seconds since the epoch) and the event's own fields.
        """
        return self.folder / "records.jsonl"

    @property
    def memory_history(self) -> Path:
        """Snapshot of torch's allocator on rank 0, with `--memory-history`."""
        return self.folder / "memory_history.pickle"

    @property
    def merged_trace(self) -> Path:
        """Profile of the job, with `--profile`: the traces of its ranks in one, see launcher/traces/merge.py."""
        return self.folder / "trace.json.gz"

    def trace(self, rank: int) -> Path:
        """Profile of one rank, with `--profile`: a Kineto trace, which is whole once it has this name."""
        return self.folder / f"rank{rank}.trace.json.gz"

    def trace_drafts(self, rank: int) -> tuple[Path, Path]:
        """Profile of one rank while it is written: as JSON, and compressed."""
        return self.folder / f".rank{rank}.trace.json", self.folder / f".rank{rank}.trace.json.gz"

    def monitor_state(self, name: str) -> Path:
        """How far a tracker has been given the records, see launcher/monitors/state.py.

        Args:
            name: name of the tracker's section of the config.
        """
        return self.folder / f"monitor-{name}.json"

    def monitor_log(self, name: str) -> Path:
        """What a tracker's own package has written.

        Args:
            name: name of the tracker's section of the config.
        """
        return self.folder / f"monitor-{name}.log"

    def log(self, rank: int) -> Path:
        """Newest part of what a rank wrote."""
        return self.folder / f"rank{rank}.log"

    def log_part(self, rank: int, number: int) -> Path:
        """Older part of what a rank wrote; the oldest is number 1."""
        return self.folder / f"rank{rank}.{number}.log"

    def error_file(self, rank: int) -> Path:
        """Why a rank failed, as it wrote itself; see `dsrun.contract.error_file`."""
        return self.folder / f"rank{rank}.error.json"

    def stacks(self, rank: int | str) -> Path:
        """Stacks of a rank, written when it is asked for them.

        Args:
            rank: number of the rank, or the letter that stands for it in a text.
        """
        return self.folder / f"rank{rank}.stacks.txt"

    def nccl_trace_prefix(self, attempt: int) -> Path:
        """Path of a rank's dump of torch's flight recorder, but for the rank's number, which torch appends.

        Args:
            attempt: number of times the job was started before.
        """
        return self.folder / f"nccl_trace_{f'attempt{attempt}_' if attempt else ''}rank_"

    @property
    def nccl_pipe_prefix(self) -> Path:
        """Path of the pipe at which a rank's flight recorder listens, but for the number and `.pipe`."""
        return self.folder / "nccl_pipe_rank_"

    def trial_pipe(self, word: str) -> Path:
        """Pipe made for a moment, to see whether the folder takes one."""
        return self.folder / f".pipe-{word}"

    def mark(self, name: str) -> Path:
        """Mark by which a host knows that it shares the folder, see launcher/agent/job_files.py."""
        return self.folder / name


def mark_name(word: str) -> str:
    """Returns the name of a mark.

    Args:
        word: secret word of the attempt.
    """
    return f".shared-{word}"


def rank_of_log(name: str) -> int | None:
    """Returns whose log has this name as its newest part; None for any other file."""
    match = _LOG_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def rank_of_trace(name: str) -> int | None:
    """Returns whose profile has this name; None for any other file."""
    match = _TRACE_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def host_folder_prefix(job_id: str) -> str:
    """Returns how the name of a job's folder begins that a host has for itself, below its temporary folder."""
    return f"dsrun-{job_id}-"


def memory_copies_prefix(job_id: str | None = None) -> str:
    """Returns how the name of a folder with copies in memory begins.

    Args:
        job_id: the job, after which the host's number follows; None for the folders of all jobs.
    """
    return "dsrun-copies-" if job_id is None else f"dsrun-copies-{job_id}-"


@dataclass(frozen=True, slots=True)
class StatePaths:
    """Paths in the folder that dsrun has in a user's state folder.

    Attributes:
        folder: dsrun's own folder there.
    """

    folder: Path

    @property
    def jobs(self) -> Path:
        """Folders of jobs, and links to those that are elsewhere."""
        return self.folder / "jobs"

    @property
    def batch_scripts(self) -> Path:
        """Scripts that were submitted to Slurm."""
        return self.folder / "slurm"

    def leases(self, machine: str) -> Path:
        """Leases of one machine's devices."""
        return self.folder / "leases" / machine

    def queue(self, machine: str) -> Path:
        """Tickets of the jobs that wait for one machine's devices."""
        return self.folder / "queue" / machine

    def sync_record(self, name: str) -> Path:
        """Record of one folder that was copied to this host."""
        return self.folder / "synced" / f"{name}.json"


def stacks_pipe(stacks: Path) -> Path:
    """Returns the FIFO at which a rank is asked for its stacks.

    Args:
        stacks: file into which it writes them.
    """
    return stacks.with_suffix(".pipe")
