"""What becomes of a profile when its job ends: the traces of its ranks in one file, and a line on what is missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.profile_request import ProfileRequest, profile_request
from dsrun.errors import InputError

from ..number_ranges import named_ranks
from ..os_errors import refusal_of
from ..records.recorded_run import read_run
from .merge import MergedTrace, read_job_times
from .rank_trace import read_rank_trace, traced_ranks

#: Larger traces are merged when somebody asks for it: the end of a job should take neither minutes nor much of the
#: launcher's memory, of which a trace takes 50 times the bytes of its file.
_MOST_BYTES = 8 << 20


def conclude_profile(folder: Path, env: Mapping[str, str], ranks: Collection[int]) -> Iterator[str]:
    """Merges what the ranks have left of a profile, and yields what there is to say of it; nothing without one.

    Args:
        folder: Folder of the job.
        env: Variables of the ranks.
        ranks: Ranks that this launcher has started.
    """
    request = profile_request(env)
    if request is None:
        return
    paths, asked = JobPaths(folder), sorted(rank for rank in ranks if request.has(rank))
    for draft in (draft for rank in asked for draft in paths.trace_drafts(rank)):
        draft.unlink(missing_ok=True)  # of a rank that was killed while it wrote
    there = [rank for rank in traced_ranks(folder) if rank in asked]
    if not there:
        yield f"--profile: no rank has left a trace: {_why_none(folder, request)}"
        return
    missing = [rank for rank in asked if rank not in there]
    if missing:
        yield f"--profile: {named_ranks(missing)} left no trace"
    if sum(paths.trace(rank).stat().st_size for rank in there) > _MOST_BYTES:
        yield f"--profile: the traces of {named_ranks(there)} are large; `dsrun trace {folder.name}` merges them"
        return
    try:
        with MergedTrace(paths.merged_trace, read_job_times(folder)) as merged:
            for rank in there:
                merged.add(read_rank_trace(folder, rank))
    except MemoryError:
        yield f"--profile: the traces are not merged: too little memory; `dsrun trace {folder.name}` tries it again"
        return
    except (OSError, InputError) as error:
        reason = refusal_of(error) or str(error) if isinstance(error, OSError) else str(error)
        yield f"--profile: the traces are not merged: {reason}"
        return
    yield f"--profile: {paths.merged_trace} shows {named_ranks(there)}; `dsrun trace {folder.name}` sums it up"


def _why_none(folder: Path, request: ProfileRequest) -> str:
    try:
        run = read_run(folder)
    except OSError:
        return "its records cannot be read"
    if not run.starts:
        return "the script has no engine of dsrun.initialize, whose steps are profiled"
    last = int(run.steps["step"][-1]) if len(run.steps) else 0
    if last < request.first:
        return f"the run ended after step {last}, before {request.steps_text}"
    return f"{request.steps_text} did not end well, or were taken before the job was started again"
