"""What is written down about a job, as files in its folder: who started what, and how it ended. Decides nothing.

`job.json` says what was asked for, `machine.json` on what (see `facts.py`), `outcome.json` how it ended. All are
replaced whole, readable by hand and by this user only. No secret is in them: see `masking.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import ConfigError
from dsrun.files.atomic import write_atomic

from ..masking import Masker, mask_plan, masked, masked_text, masked_words, masker_of
from ..plan.launch_plan import LaunchPlan

#: How a job may end, as `outcome.json` says it.
ENDINGS = ("done", "failed", "stopped")

#: Raised whenever a field changes its meaning or goes away; new fields do not raise it.
SCHEMA_VERSION = 1
_MODE = 0o600
#: A member of YAML's objects on one line: `{api_key: X}`.
_MEMBER = re.compile(r"""(([\w.-]+)\s*:\s+)([^\s,{}\[\]"']+)""")
#: How a file grows that others read meanwhile; not through a link that somebody planted.
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """One process among all that ever had its pid.

    Attributes:
        pid: its number.
        start_ticks: start time of the process, in the kernel's ticks since the boot.
        boot_id: id of the boot in which the process started.
    """

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessMark | None:
        """Marks a live process; None where there is none of that number, or it is a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        # The name, in brackets, may hold anything; state is the third field and the start the 22nd.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid=pid, start_ticks=int(fields[19]), boot_id=boot_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What was asked for.

    Attributes:
        id: the job's.
        created: time when the job was made, in local time with its zone.
        command: the words after `dsrun`, secrets masked.
        masked_words: indices of the words of `command` that are not as they were typed.
        cwd: folder in which the command was typed.
        user: name of the user who typed the command.
        host: name of the host that the front end runs on.
        front_end: its process.
        detached: whether the job runs in the background, without a terminal.
        queued: whether the job waits its turn for devices before it starts.
        started: time when the job got its devices; None while it waits for them.
        config: absolute path of the training config.
        config_digest: SHA-256 digest of the config's bytes; None where there is no config.
        ranks: number of ranks that this dsrun starts.
        hosts: names of the hosts that the ranks run on.
        transport: the way to those that are not this machine; `local` where there is none.
        plan: the launch as `LaunchPlan.to_json` gave it, secrets masked; to be shown, for its form may be an older one.
        schema_version: version of the form of `job.json`.
    """

    id: str
    created: datetime
    command: tuple[str, ...]
    masked_words: tuple[int, ...]
    cwd: str
    user: str
    host: str
    front_end: ProcessMark
    detached: bool
    queued: bool
    started: datetime | None
    config: str | None
    config_digest: str | None
    ranks: int
    hosts: tuple[str, ...]
    plan: dict[str, Any]
    transport: str = "local"
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        body = asdict(self)
        started = None if self.started is None else self.started.isoformat(timespec="milliseconds")
        body = {"schema_version": body.pop("schema_version")} | body
        return body | {"created": self.created.isoformat(timespec="milliseconds"), "started": started}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> JobRecord:
        """Reads what `to_json` wrote, and what a later version of it may add.

        Raises:
            ValueError, KeyError, TypeError: it is no such value.
        """
        started = value["started"]
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        changed: dict[str, Any] = {
            "created": datetime.fromisoformat(value["created"]),
            "started": None if started is None else datetime.fromisoformat(started),
            "command": tuple(value["command"]),
            "masked_words": tuple(value["masked_words"]),
            "hosts": tuple(value["hosts"]),
            "front_end": ProcessMark(**value["front_end"]),
        }
        return cls(**(known | changed))


def new_record(
    plan: LaunchPlan,
    *,
    words: Sequence[str],
    now: datetime,
    detached: bool,
    queued: bool,
    config: str | None,
    config_digest: str | None,
    transport: str,
    environ: Mapping[str, str],
    own_options: Collection[str] = (),
) -> JobRecord:
    """Returns the record of a job whose front end is this process.

    Args:
        plan: the launch, with all its secrets.
        words: the words after `dsrun`, as they were typed.
        now: time when the job was made.
        detached: whether the job runs in the background, without a terminal; see `JobRecord`.
        queued: whether the job waits its turn for devices before it starts; see `JobRecord`.
        config: absolute path of the training config; None where there is none. See `JobRecord`.
        config_digest: SHA-256 digest of the config's bytes; None where there is no config. See `JobRecord`.
        transport: name of the way to hosts that are not this machine, `local` where there is none; see `JobRecord`.
        environ: environment variables; the values of secrets are known from them and from the plan.
        own_options: names of dsrun's own options, which take no secret; see `masked_words`.
    """
    masker = masker_of(plan, environ)
    command = tuple(masker.text(word) for word in masked_words(words, own_options=own_options))
    mark = ProcessMark.of(os.getpid())
    assert mark is not None, "/proc shows this process"
    return JobRecord(
        id=plan.job_id,
        created=now,
        command=command,
        masked_words=tuple(at for at, (shown, word) in enumerate(zip(command, words, strict=True)) if shown != word),
        cwd=plan.cwd,
        user=_user_name(),
        host=os.uname().nodename,
        front_end=mark,
        detached=detached,
        queued=queued,
        started=None,
        config=config,
        config_digest=config_digest,
        ranks=len(plan.ranks),
        hosts=tuple(node.host.name for node in plan.nodes),
        transport=transport,
        plan=mask_plan(plan.to_json(), masker),
    )


def started_record(record: JobRecord, plan: LaunchPlan, *, now: datetime, environ: Mapping[str, str]) -> JobRecord:
    """Returns the record of a job that has got its devices.

    Args:
        record: record of the job from before it got its devices.
        plan: the launch with the devices.
        now: time when the job got its devices.
        environ: environment variables; the values of secrets are known from them and from the plan, as for
            `new_record`.
    """
    return replace(record, started=now, plan=mask_plan(plan.to_json(), masker_of(plan, environ)))


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        # A container may run under a number that has no name.
        return str(os.getuid())


def copy_config(path: str | None, folder: Path) -> str | None:
    """Keeps the training config beside the job, for the file may be changed the next minute.

    Args:
        path: the config; None where the job has none.
        folder: the job's.

    Returns:
        digest (SHA-256) of the config's bytes; None where the job has none, or it is no file any more.

    Raises:
        OSError: the folder cannot be written to.
    """
    try:
        data = b"" if path is None else Path(path).read_bytes()
    except OSError:
        return None
    if path is None:
        return None
    write_atomic(JobPaths(folder).config_copy, _without_secrets(data, Path(path)), mode=_MODE)
    return hashlib.sha256(data).hexdigest()


def _without_secrets(data: bytes, path: Path) -> bytes:
    """Returns a config's bytes as they are, or as plain JSON where a value in it is to be hidden.

    A secret may stand in the text in many ways (in quotes, on a line of its own, folded), so values are looked for in
    what the text means.
    """
    text = data.decode("utf-8", "surrogateescape")
    has_comments = False
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value, has_comments = _meaning_of(text, path), True
    hidden = Masker().value(value)
    if hidden != value:
        return (json.dumps(hidden, indent=2) + "\n").encode(errors="replace")
    if not has_comments:
        return data
    # A key may stand in a comment, or in a text that nobody can read.
    return "".join(map(_line_without_secrets, text.splitlines(keepends=True))).encode("utf-8", "surrogateescape")


def _meaning_of(text: str, path: Path) -> Any:
    """Returns what YAML, or JSON with comments, comes to; None where it comes to nothing."""
    # Parsers take a while to import, and most configs are plain JSON.
    from dsrun.config.text.json_parser import parse_json

    try:
        if path.suffix.lower() not in (".yaml", ".yml"):
            return parse_json(text, "").plain()
        from dsrun.config.text.yaml_parser import parse_yaml

        return parse_yaml(text, "").plain()
    except ConfigError:
        return None


def _line_without_secrets(line: str) -> str:
    match = re.fullmatch(r"""(\s*["']?([\w.-]+)["']?\s*:\s*)(\S[^\n]*)(\n?)""", line)
    if match is None or match[3][0] in "{[":
        return masked_text(_MEMBER.sub(lambda found: f"{found[1]}{masked(found[2], found[3])}", line))
    return f"{match[1]}{masked(match[2], match[3])}{match[4]}"


def write_record(folder: Path, record: JobRecord) -> None:
    """Writes `job.json`.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_json(JobPaths(folder).record, record.to_json())


def write_outcome(folder: Path, value: dict[str, Any]) -> None:
    """Writes `outcome.json`, while the lock is held.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_json(JobPaths(folder).outcome, value)


def read_record(folder: Path) -> JobRecord | None:
    """Reads `job.json`; None where there is none, or it is of a version that this one does not know."""
    value = read_json(JobPaths(folder).record)
    if value is None or value.get("schema_version") != SCHEMA_VERSION:
        return None
    try:
        return JobRecord.from_json(value)
    except (ValueError, KeyError, TypeError):
        return None


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """Reads `outcome.json`; None where there is none, or it is damaged or of a version that this one does not know."""
    value = read_json(JobPaths(folder).outcome)
    if value is None or value.get("schema_version") != SCHEMA_VERSION or value.get("outcome") not in ENDINGS:
        return None
    try:
        datetime.fromisoformat(value["ended"])
    except (KeyError, TypeError, ValueError):
        return None
    failure: Any = value.get("failure", "")
    is_whole = (
        all(isinstance(value.get(name), int) for name in ("exit_code", "attempts"))
        and isinstance(value.get("duration_s"), int | float)
        and all(isinstance(value.get(name), str) for name in ("job_id", "run_dir"))
        and (failure is None or (isinstance(failure, list) and all(isinstance(line, str) for line in failure)))
    )
    return value if is_whole else None


def event_line(name: str, fields: Mapping[str, Any]) -> bytes:
    """Returns a line of the event file, as of now."""
    return (json.dumps({"event": name, "time": round(time.time(), 6), **fields}) + "\n").encode()


def append_waiting(folder: Path, text: str) -> None:
    """Writes down what a job waits for that has no rank yet, for who looks from elsewhere.

    Args:
        folder: the job's.
        text: one line, secrets masked.

    Raises:
        OSError: the folder cannot be written to.
    """
    descriptor = os.open(JobPaths(folder).events, APPEND, _MODE)
    try:
        os.write(descriptor, event_line("waiting", {"text": text}))
    finally:
        os.close(descriptor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file of the record by a value."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode(), mode=_MODE)


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a file of the record; None where it is missing or no JSON object."""
    try:
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
