"""Two ranks of one contender under the Trainer, in processes that wait for their turn. Judges nothing.

Each rank is `python train.py ...` (dsrun's: `python -m dsrun.as_deepspeed train.py ...`) with the variables that a
launcher would set, the same for all: no launcher's choice of cores or threads is in a figure.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from torch._C._distributed_c10d import TCPStore

_BENCH = Path(__file__).resolve().parents[1]
_SCRIPT = Path(__file__).resolve().parent / "train.py"
#: This checkout of dsrun.
CHECKOUT = _BENCH.parents[1]
RANKS = 2
#: Steps that the Trainer takes the mean loss of, and logs.
LOG_STEPS = 5
#: DeepSpeed's first start compiles, some minutes on a slow machine.
_START_S = 900.0
#: A rank that hangs is an error and not a figure.
_TURN_S = 300.0
#: Ranks that are at their last step end by themselves; a contender that hangs then has been measured all the same.
_END_S = 30.0

Contender = Literal["dsrun", "before", "deepspeed", "ddp"]
#: Where the class of the model lives that the Trainer calls.
_MODEL_OF: Mapping[Contender, str] = {
    "dsrun": "dsrun.",
    "before": "dsrun.",
    "deepspeed": "deepspeed.",
    "ddp": "torch.nn.parallel.",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama and the batch of a rank, one sample.

    Attributes:
        hidden: width; the MLP's is 11/4 of it.
        layers: number of blocks.
        vocab: number of tokens there are.
        tokens: tokens of a sample.
    """

    hidden: int
    layers: int
    vocab: int
    tokens: int

    @property
    def numel(self) -> int:
        """Parameters: attention, MLP and two norms a block, two tables of the vocabulary, the last norm."""
        h = self.hidden
        return self.layers * (4 * h * h + 3 * h * (h * 11 // 4) + 2 * h) + 2 * self.vocab * h + h


SMALL = Shape(hidden=256, layers=8, vocab=8192, tokens=128)
LARGE = Shape(hidden=512, layers=12, vocab=8192, tokens=128)


@dataclass(frozen=True, slots=True)
class Job:
    """What both ranks do.

    Attributes:
        contender: contender that trains.
        stage: ZeRO stage; of no account for `ddp`.
        offload: offload to the CPU: the optimizer, and at stage 3 the parameters too.
        shape: the model.
        steps: number of turns that are given.
    """

    contender: Contender
    stage: int
    offload: bool
    shape: Shape
    steps: int

    @property
    def row(self) -> str:
        """Name in tables."""
        return f"{self.contender}, offload" if self.offload else self.contender

    def config(self) -> dict[str, Any]:
        """Returns the config file, as Transformers' guide has it: the Trainer fills in what is `auto`."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        return {
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": zero,
        }

    def words(self, folder: Path) -> list[str]:
        """Returns the arguments of the script, and writes the config that they name.

        Args:
            folder: folder for the config, and for what the Trainer writes.
        """
        # One step more than is given turns: a turn ends where the next step begins.
        given = {
            "output_dir": folder / "out",
            "max_steps": self.steps + 1,
            "logging_steps": LOG_STEPS,
            "use_cpu": True,
            "per_device_train_batch_size": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "ddp_find_unused_parameters": False,
            "hidden": self.shape.hidden,
            "layers": self.shape.layers,
            "vocab": self.shape.vocab,
            "tokens": self.shape.tokens,
        }
        if self.contender != "ddp":
            given["deepspeed"] = folder / "ds.json"
            (folder / "ds.json").write_text(json.dumps(self.config()))
        return [str(_SCRIPT), *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of a job.

    Attributes:
        turn_s: seconds from the step's beginning to the next one's, of the slowest rank.
        step_s: seconds to the end of what the Trainer calls a step, of the slowest rank.
        cpu_s: CPU seconds of all ranks.
        losses: losses that were logged, means of `LOG_STEPS` steps and of all ranks.
    """

    turn_s: float
    step_s: float
    cpu_s: float
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank that waits for its turn.

    Attributes:
        connection: connection that its callback has made.
        words: lines both ways over it.
    """

    connection: socket.socket
    words: TextIO


class Team:
    """The ranks of a job; a context, at whose end none is left.

    Args:
        job: job that they do.
        python: interpreter that has the contender.
        checkout: checkout of this repository that has dsrun.
    """

    def __init__(self, job: Job, *, python: str = sys.executable, checkout: Path = CHECKOUT) -> None:
        self.job = job
        self._python = python
        self._checkout = checkout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="bench")
        self._log = Path(self._folder.name) / "log"

    def __enter__(self) -> Team:
        """Starts the processes; `ready` waits for them."""
        folder = Path(self._folder.name)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "turns"))
        self._listener.listen()
        # The port is the kernel's choice, and the store this process's, as under torchrun.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ours = self.job.contender in ("dsrun", "before")
        words = [self._python, *(("-m", "dsrun.as_deepspeed") if ours else ()), *self.job.words(folder)]
        with self._log.open("ab") as log:
            for rank in range(RANKS):
                place = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": RANKS,
                    "LOCAL_WORLD_SIZE": RANKS,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": self._store.port,
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "BENCH_TURNS_SOCKET": folder / "turns",
                }
                env = {**environment(self._python, self._checkout), **{key: str(value) for key, value in place.items()}}
                self._processes.append(
                    subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
                )
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes, whatever has become of them."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for rank in self._ranks:
            rank.connection.close()
        self._listener.close()
        self._folder.cleanup()

    def ready(self) -> None:
        """Waits until both ranks are at their first step.

        Raises:
            RuntimeError: a rank has ended, or is not there in time, or trains with something else.
        """
        until = time.monotonic() + _START_S
        ranks: dict[int, _Rank] = {}
        while len(ranks) < RANKS:
            if time.monotonic() > until or any(process.poll() is not None for process in self._processes):
                raise self._failure("did not begin to train")
            self._listener.settimeout(0.5)
            try:
                connection = self._listener.accept()[0]
            except TimeoutError:
                continue
            connection.settimeout(_TURN_S)
            connected = _Rank(connection, connection.makefile("rw"))
            self._ranks.append(connected)
            hello = self._read(connected)
            called_right = hello["model"].startswith(_MODEL_OF[self.job.contender])
            stage = None if self.job.contender == "ddp" else self.job.stage
            if not called_right or hello["world_size"] != RANKS or hello["stage"] != stage:
                raise self._failure(f"trains with something else: {hello}")
            ranks[hello["rank"]] = connected
        self._ranks = [ranks[rank] for rank in range(RANKS)]

    def turn(self) -> Turn:
        """Gives both ranks a turn, and waits until they have taken it.

        Raises:
            RuntimeError: a rank has ended, or does not answer in time.
        """
        try:
            for rank in self._ranks:
                print("go", file=rank.words, flush=True)
        except ConnectionError as error:
            raise self._failure("a rank has ended") from error
        found = [self._read(rank) for rank in self._ranks]
        return Turn(
            turn_s=max(each["turn_s"] for each in found),
            step_s=max(each["step_s"] for each in found),
            cpu_s=sum(each["cpu_s"] for each in found),
            losses=tuple(found[0]["losses"]),
        )

    def finish(self) -> None:
        """Lets the training end, and sees that it ends well.

        Raises:
            RuntimeError: a rank failed after its last step.
        """
        for rank in self._ranks:
            rank.connection.shutdown(socket.SHUT_WR)
        for process in self._processes:
            try:
                code = process.wait(_END_S)
            except subprocess.TimeoutExpired:
                continue
            if code:
                raise self._failure(f"ended with exit code {code}")

    def _read(self, rank: _Rank) -> dict[str, Any]:
        try:
            line = rank.words.readline()
        except TimeoutError:
            raise self._failure(f"no answer in {_TURN_S:g} s") from None
        except ConnectionError as error:
            raise self._failure("a rank has ended") from error
        if not line:
            raise self._failure("a rank has ended")
        return json.loads(line)

    def _failure(self, what: str) -> RuntimeError:
        said = self._log.read_text(errors="replace")[-3000:]
        return RuntimeError(f"{self.job.row}, stage {self.job.stage}: {what}; the ranks said:\n{said}")


def environment(python: str, checkout: Path, paths: Iterable[str] = ()) -> dict[str, str]:
    """Returns the variables of a process that is measured.

    Args:
        python: interpreter of the process; its folder comes first on PATH, for DeepSpeed looks for ninja there.
        checkout: checkout of this repository that has dsrun.
        paths: folders before the checkout's, for imports.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DSRUN_", "ACCELERATE_", "DS_")) and name != "PYTHONPATH"
    }
    return {
        **kept,
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([*paths, str(checkout / "src")]),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
