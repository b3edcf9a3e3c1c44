"""The Trainer's callback by which contenders take turns: a step waits for a word, and says afterwards what it took.

A turn goes from one step's beginning to the next one's: forward, backward, update, log and the next batch. jobs.py has
the other end of the socket. Measures nothing but time, and imports no contender.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

#: Path of the socket; the one variable that a job of the benchmark has and a user's has not.
SOCKET_ENV = "BENCH_TURNS_SOCKET"


class Turns(TrainerCallback):
    """Waits at the beginning of each step.

    Args:
        model: function that returns the class of the model that the Trainer calls, once training has begun.
    """

    def __init__(self, model: Callable[[], type]) -> None:
        self._model = model
        self._losses: list[float] = []
        self._began: tuple[float, float] | None = None
        self._step_s = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Says who this is."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[SOCKET_ENV])
        self._front = connection.makefile("rw")
        called = self._model()
        plugin = args.deepspeed_plugin
        self._say(
            rank=args.process_index,
            world_size=args.world_size,
            model=f"{called.__module__}.{called.__qualname__}",
            deepspeed=getattr(sys.modules.get("deepspeed"), "__file__", None),
            stage=None if plugin is None else plugin.zero_stage,
        )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Says what the last turn took, and waits for the next; the end of the words ends the training."""
        if self._began is not None:
            wall_s, cpu_s = self._began
            self._say(
                turn_s=time.perf_counter() - wall_s,
                step_s=self._step_s,
                cpu_s=time.process_time() - cpu_s,
                losses=self._losses,
            )
            self._losses = []
        if not self._front.readline():
            control.should_training_stop = True
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Notes what the Trainer itself calls a step."""
        assert self._began is not None, "a step begins before it ends"
        self._step_s = time.perf_counter() - self._began[0]

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Keeps the mean loss of the steps since the last log; it is all ranks'."""
        logs: dict[str, float] = more["logs"]
        if "loss" in logs:
            self._losses.append(logs["loss"])

    def _say(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self._front, flush=True)
