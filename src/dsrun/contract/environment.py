"""What launcher and workers agree on: the variables of a worker's environment.

The only place that names RANK, MASTER_ADDR and their kin. The names are torchrun's, so plain torch scripts
work unchanged, and a worker started by torchrun is understood as well. Ranks of mpirun and srun have none of these
names: `dsrun.contract.foreign_ranks` knows theirs.

[Note: resuming] The runtime appends a `CHECKPOINT_EVENT` to the job's records (`JobPaths.records`) once a checkpoint is
complete and durable; where there is no room for it, the runtime says so and goes on. A launcher that starts the job
again puts the `path` of the newest one into `RESUME_ENV`, and `engine.load_checkpoint` loads it.

[Note: nonce] Who serves the rendezvous store sets `NONCE_KEY` in it and `NONCE_ENV` in the ranks. A rank that finds
another value there, or none, has reached another job's store, and ends.

[Note: who speaks first] When ranks wait for one that hangs, two may end it: the launcher, which sees that nobody makes
progress and says who is where, and torch's time-out of the process group, which raises in Gloo and aborts the process
in NCCL, and knows one rank only. The launcher's comes first: groups that dsrun makes wait a good while longer, and the
launcher tells ranks how long in `GROUP_TIMEOUT_ENV`. It never makes that time shorter than the default: a job that is
to be told of a hang after a minute must not lose a barrier that takes five.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.foreign_ranks import find_foreign_rank, meeting_point
from dsrun.errors import InputError

#: Absolute path of the training config that was checked before the launch.
CONFIG_ENV = "DSRUN_CONFIG"
#: Id of the job; every process of a job carries it.
JOB_ID_ENV = "DSRUN_JOB_ID"
#: Folder of this job on this host: logs, records, error files.
RUN_DIR_ENV = "DSRUN_RUN_DIR"
#: Version of DeepSpeed that dsrun stands for in a job whose `import deepspeed` gives dsrun, see `dsrun.as_deepspeed`;
#: absent where it does not.
AS_DEEPSPEED_ENV = "DSRUN_AS_DEEPSPEED"
#: Set once a process has said on the first rank that its `deepspeed` is dsrun: those that it starts say it no more.
SAID_DEEPSPEED_ENV = "DSRUN_AS_DEEPSPEED_SAID"
#: Engines that this process has made with an optimizer, behind the process; absent before there is an engine.
ENGINE_ENV = "DSRUN_ENGINE"
#: Ranks along the axes of this process's last engine, behind the process that has made it.
AXES_ENV = "DSRUN_AXES"
#: Sizes of axes that the launch has planned where the config leaves them open, as `pipe=2,tensor=4`; absent where it
#: has planned none.
PLANNED_AXES_ENV = "DSRUN_PLANNED_AXES"
#: Option, `--local_rank`, that a rank's program gets as its first word, with the rank's number on its host; absent
#: where it gets none. Taken out of the environment where the word is added.
LOCAL_RANK_WORD_ENV = "DSRUN_LOCAL_RANK_WORD"
#: `nccl` or `gloo` where the user asked for one; absent means the runtime chooses.
BACKEND_ENV = "DSRUN_BACKEND"
#: Path of the host's heartbeat table (see `dsrun.contract.heartbeats`); a worker's slot is its LOCAL_RANK.
HEARTBEAT_ENV = "DSRUN_HEARTBEAT"
#: Secret word of the job, the same for all its ranks: what tells its rendezvous store from another job's.
NONCE_ENV = "DSRUN_NONCE"
#: Folder of the newest complete checkpoint, set when a job is started again; absent on a first start.
RESUME_ENV = "DSRUN_RESUME"
#: Folder below shared memory in which this host keeps copies of its ranks' state for when the job is started again; set
#: where it may be. The agent removes it, see [Note: copies in memory] in launcher/agent/memory_copy_folder.py.
MEMORY_COPY_ENV = "DSRUN_MEMORY_COPY"
#: torch elastic's variable: how often the job was started before.
RESTART_COUNT_ENV = "TORCHELASTIC_RESTART_COUNT"
#: File into which a rank writes its stacks when the agent asks for them, see `dsrun.contract.job_paths.stacks_pipe`.
STACKS_ENV = "DSRUN_STACKS"
#: Set where rank 0 shall record which lines of code allocate (`--memory-history`).
MEMORY_HISTORY_ENV = "DSRUN_MEMORY_HISTORY"
#: Steps that ranks shall profile (`--profile`), see `dsrun.contract.profile_request`; absent where none.
PROFILE_ENV = "DSRUN_PROFILE"
#: Pipe by which a rank tells what it does with its stdin, see launcher/agent/start/rank_stdin.py; set for every rank.
READING_ENV = "DSRUN_READING"
#: Rank that was given dsrun's own stdin; empty where none was.
STDIN_RANK_ENV = "DSRUN_STDIN_RANK"
#: Key of the rendezvous store under which the launcher leaves the job's nonce.
NONCE_KEY = "dsrun/nonce"
#: Sent for their Python stacks to ranks that catch it and have not answered otherwise; a real-time signal, so that USR1
#: and USR2 stay the user's.
STACKS_SIGNAL = signal.SIGRTMIN + 9
#: Seconds that groups which dsrun makes wait for other ranks, see [Note: who speaks first]; absent means the default.
GROUP_TIMEOUT_ENV = "DSRUN_GROUP_TIMEOUT"
#: Without progress for this long, a rank that beats hangs, where the user named no time.
DEFAULT_HANG_TIMEOUT_S = 1800.0
#: Name of the launcher's thread in a rank whose program has ended well, which will leave its process groups.
LEAVING_THREAD = "dsrun-leaving"
#: torch elastic's variable: where a failing worker writes its traceback as JSON.
ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"

#: Event of a saved checkpoint, written when it is complete and durable, see [Note: resuming]. Fields: `path` (absolute,
#: the tag's folder), `tag`, `step` (optimizer steps it holds), `seconds`, `bytes`.
CHECKPOINT_EVENT = "checkpoint"
#: Event of the first copy of the state in memory that an attempt makes. Fields: `step`, `bytes` (of rank 0's copies).
MEMORY_COPY_EVENT = "memory_copy"


def store_nonce(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the nonce that the rendezvous store of this worker must hold; None where its launcher left none.

    A rank that torchrun started inside a dsrun job has inherited dsrun's nonce, but meets at torchrun's store.
    """
    env = os.environ if environ is None else environ
    nonce = env.get(NONCE_ENV)
    return nonce if nonce and env.get("TORCHELASTIC_RUN_ID") == env.get(JOB_ID_ENV) else None


def resume_folder(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the checkpoint that a job which was started again goes on from, see [Note: resuming]; None at first.

    It is a folder, or an address of an object store.
    """
    return (os.environ if environ is None else environ).get(RESUME_ENV) or None


def stands_for_deepspeed(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `import deepspeed` gives dsrun in this process, whose script then expects what DeepSpeed does."""
    return bool((os.environ if environ is None else environ).get(AS_DEEPSPEED_ENV))


def take_local_rank_word(environ: MutableMapping[str, str]) -> list[str]:
    """Returns the word with the local rank that the program of a rank is to get, and takes it out of the environment.

    Args:
        environ: environment of the rank; processes that the program starts get no such word.
    """
    option = environ.pop(LOCAL_RANK_WORD_ENV, None)
    return [] if option is None else [f"{option}={environ.get('LOCAL_RANK', '0')}"]


def note_engine(*, trains: bool = False) -> None:
    """Writes down that this process has made an engine; for `has_made_engine` and `training_engines`.

    Args:
        trains: whether the engine has an optimizer.
    """
    os.environ[ENGINE_ENV] = f"{os.getpid()} {training_engines() + trains}"


def note_axes(sizes: Mapping[str, int]) -> None:
    """Writes down how the ranks of this process's last engine are divided; for `noted_axes`.

    Args:
        sizes: ranks along each axis, by its name.
    """
    os.environ[AXES_ENV] = f"{os.getpid()} {json.dumps(dict(sizes))}"


def noted_axes() -> dict[str, int]:
    """Returns the ranks along the axes of this process's last engine, by their names; empty before there is one."""
    pid, _, sizes = os.environ.get(AXES_ENV, "").partition(" ")
    return json.loads(sizes) if pid == str(os.getpid()) else {}


def write_planned_axes(sizes: Mapping[str, int]) -> str:
    """Returns what `PLANNED_AXES_ENV` holds for these sizes of axes."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def planned_axes(environ: Mapping[str, str] | None = None) -> dict[str, int]:
    """Returns the sizes of axes that the launch has planned, by name of the axis; empty where it has planned none.

    Raises:
        InputError: the variable holds no sizes.
    """
    text = (os.environ if environ is None else environ).get(PLANNED_AXES_ENV)
    if not text:
        return {}
    pairs = [re.fullmatch(r"([a-z]+)=([1-9][0-9]*)", part) for part in text.split(",")]
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair is not None}
    if len(sizes) < len(pairs):
        raise InputError(f"environment: {PLANNED_AXES_ENV} is {text!r}; expected sizes above 0 like 'pipe=2,tensor=4'")
    return sizes


def has_made_engine() -> bool:
    """Whether this process has made an engine; those of its parents do not count."""
    return os.environ.get(ENGINE_ENV, "").partition(" ")[0] == str(os.getpid())


def training_engines() -> int:
    """Returns the number of engines with an optimizer that this process has made; those of its parents do not count."""
    pid, _, count = os.environ.get(ENGINE_ENV, "").partition(" ")
    return int(count) if pid == str(os.getpid()) else 0


def is_first_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is rank 0 or a lone one, for lines that one rank says for all. Checks nothing else."""
    env = os.environ if environ is None else environ
    if "RANK" in env:
        return env["RANK"] == "0"
    found = find_foreign_rank(env)
    return found is None or found.rank == 0


def memory_copy_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns where this host keeps copies in memory; None where nobody would start the job again, or remove them."""
    text = (os.environ if environ is None else environ).get(MEMORY_COPY_ENV)
    return Path(text) if text else None


def was_started_again(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this is a further attempt at a job."""
    return (os.environ if environ is None else environ).get(RESTART_COUNT_ENV, "0") != "0"


def group_timeout_after(hang_timeout_s: float) -> float:
    """Returns how long groups wait for other ranks so that the launcher speaks first, see [Note: who speaks first].

    A third more, and five minutes at least: under NCCL a collective's time begins when it is queued, which may be a
    step before the last heartbeat.

    Args:
        hang_timeout_s: longest time without progress.
    """
    longest_s = max(hang_timeout_s, DEFAULT_HANG_TIMEOUT_S)
    return longest_s + max(300.0, longest_s / 3)


def group_timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """Returns how long groups that dsrun makes in this process wait for other ranks, where the script names no time.

    Raises:
        InputError: the variable holds no time.
    """
    text = (os.environ if environ is None else environ).get(GROUP_TIMEOUT_ENV)
    if not text:
        return group_timeout_after(DEFAULT_HANG_TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"environment: {GROUP_TIMEOUT_ENV} is {text!r}; expected seconds above 0")
    return seconds


def digest_of(words: Sequence[str]) -> str:
    """Returns what stands for a script's words in its records, where passwords among them would not be safe."""
    text = "\0".join(words).encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Who a worker is and where the ranks meet.

    Attributes:
        rank: global rank, 0 <= rank < world_size.
        world_size: ranks of the job.
        local_rank: rank among the workers of this host; also the index of its device.
        local_world_size: workers of this host.
        node_rank: index of this host.
        node_count: hosts of the job.
        master_addr: address of the rendezvous store.
        master_port: port of the rendezvous store; 0 for a lone process that needs none.
        agent_store: the launcher serves the store, so no rank may try to.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    node_count: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    agent_store: bool = False

    def to_env(self) -> dict[str, str]:
        """Returns torchrun's environment for this rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.node_count),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> RankInfo:
        """Reads this process's place in the job; a process started alone is rank 0 of 1.

        RANK counts before what mpirun or srun say, inside of whose ranks a launcher may have started its own.

        Raises:
            InputError: RANK is set without its kin, a value is not a whole number in range, or mpirun started ranks on
                several hosts and MASTER_ADDR is not set.
        """
        env = os.environ if environ is None else environ
        if "RANK" not in env:
            return cls._of_foreign(env)
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise InputError(
                f"environment: RANK is {env['RANK']!r} but {', '.join(missing)} is not set",
                hint="start the script with `dsrun` or `torchrun`, or unset RANK to run one process",
            )
        world_size = _whole(env, "WORLD_SIZE", minimum=1)
        return cls(
            rank=_whole(env, "RANK", maximum=world_size - 1),
            world_size=world_size,
            local_rank=_whole(env, "LOCAL_RANK", default=0),
            local_world_size=_whole(env, "LOCAL_WORLD_SIZE", default=1, minimum=1),
            node_rank=_whole(env, "NODE_RANK", default=_whole(env, "GROUP_RANK", default=0)),
            node_count=_whole(env, "GROUP_WORLD_SIZE", default=1, minimum=1),
            master_addr=env["MASTER_ADDR"],
            master_port=_whole(env, "MASTER_PORT"),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @classmethod
    def _of_foreign(cls, env: Mapping[str, str]) -> RankInfo:
        found = find_foreign_rank(env)
        if found is None:
            return cls()
        address, port = meeting_point(found, env)
        return cls(
            rank=found.rank,
            world_size=found.world_size,
            local_rank=found.local_rank,
            local_world_size=found.local_world_size,
            node_rank=found.node_rank,
            node_count=found.node_count,
            master_addr=address,
            master_port=port,
        )


def _whole(
    env: Mapping[str, str], name: str, *, default: int | None = None, minimum: int = 0, maximum: int | None = None
) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise InputError(f"environment: {name} is {text!r}; expected a whole number") from None
    if value < minimum or (maximum is not None and value > maximum):
        upper = "" if maximum is None else f" and at most {maximum}"
        raise InputError(f"environment: {name} is {value}; expected at least {minimum}{upper}")
    return value
