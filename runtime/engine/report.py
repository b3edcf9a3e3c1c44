"""What the user sees of a step: a record, and a printed line now and then. Measures wall time and the mean loss."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from dsrun.contract.step_records import STEP_EVENT

from ..observe.memory import used_bytes
from ..observe.records import RecordWriter
from ..observe.wait_report import WaitReport
from ..observe.wear import DiskWear
from ..parallel.tensor.same_steps import StepWatch
from .progress import Counters
from .step import StepResult


class StepReport:
    """Collects losses between optimizer steps and reports each step from rank 0.

    Args:
        records: writer of the run's records, which gets each step.
        data_ranks: ranks with samples of their own.
        counts_losses: whether this rank's losses count: of ranks that share samples, the first one's do.
        tells: whether this rank writes records and prints lines.
        steps_per_print: optimizer steps between printed lines; None for none.
        device: device that losses are summed on, so that the host need not read them.
        model_numel: trained parameters of the whole model, for the estimate of operations.
        total_steps: optimizer steps of the whole run, where the schedule says so.
        wear: counter of the bytes written to disks; None where nothing goes to disks.
        waits: report of what the ranks wait in; None for none.
        same: watch over what ranks that share each layer do; None for none.
    """

    def __init__(
        self,
        records: RecordWriter,
        *,
        data_ranks: int,
        counts_losses: bool,
        tells: bool,
        steps_per_print: int | None,
        device: torch.device,
        model_numel: int,
        total_steps: int | None,
        wear: DiskWear | None = None,
        waits: WaitReport | None = None,
        same: StepWatch | None = None,
    ) -> None:
        self._data_ranks = data_ranks
        self._counts_losses = counts_losses
        self._tells = tells
        self._records = records
        self._steps_per_print = steps_per_print
        #: fp64, [2]: losses since the last step, and its request to stop, for the step's own all-reduce.
        self.shared_2 = torch.zeros(2, dtype=torch.float64, device=device)
        self._losses = 0
        self._missed = False  # a loss of the present step
        self._tokens = 0
        self._device = device
        self._model_numel = model_numel
        self._total_steps = total_steps
        self._wear = wear
        self._waits = waits
        self._same = same
        self._started = time.perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """Takes one micro batch's mean loss, detached, [1], on any device: scripts move what the model returns."""
        if self._counts_losses:
            self.shared_2[:1] += loss.to(self._device)
        if self._same is not None:
            self._same.add_loss(loss)
        self._losses += 1

    def pass_loss(self) -> None:
        """Counts a micro batch whose loss another rank of the pipeline has."""
        self._losses += 1

    def forget_losses(self) -> None:
        """Forgets the losses and tokens of a global batch that is given up."""
        self.shared_2[:1].zero_()
        if self._same is not None:
            self._same.forget()
        self._losses = self._tokens = 0
        self._missed = False

    def miss_loss(self) -> None:
        """A micro batch's loss is not known: the mean of this step is not told."""
        self._missed = True

    def add_stop_request(self, number: float) -> None:
        """Tells the other ranks a number with the next step, see `stop_signals`."""
        self.shared_2[1:].fill_(number)

    def add_tokens(self, tokens: int) -> None:
        """Takes the tokens of one forward that trains; 0 where they are not known."""
        self._tokens += tokens

    def step(
        self, result: StepResult, counters: Counters, *, lr: list[float], samples: int, next_scale: float = 1.0
    ) -> None:
        """Reports one optimizer step; every rank must call, as the ranks compare their waits now and then.

        Args:
            result: result of the step.
            counters: training counters, with this step counted.
            lr: the rates it was taken with.
            samples: number of samples of all ranks in this step.
            next_scale: loss scale of the next step.
        """
        loss = None if self._missed else result.loss_sum / (max(1, self._losses) * self._data_ranks)
        self._missed = False
        self.shared_2.zero_()
        self._losses = 0
        # The other ranks' batches have the same shape, or nearly: no collective is spent on their numbers.
        tokens, self._tokens = self._tokens * self._data_ranks, 0
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        number = counters.global_steps
        if self._waits is not None:
            self._waits.end_step(number)
        if not self._tells:
            return
        self._records.write(
            STEP_EVENT,
            {
                "step": number,
                **({} if loss is None else {"loss": loss}),
                "lr": lr[0],
                "grad_norm": result.grad_norm,
                "applied": result.applied,
                "samples": counters.global_samples,
                "seconds": round(seconds, 6),
                "memory_bytes": used_bytes(self._device),
                **({"loss_scale": result.loss_scale} if result.loss_scale != 1.0 else {}),
                **({"non_finite": result.non_finite} if result.non_finite is not None else {}),
                **({"stepped_ahead": round(result.ahead, 4)} if result.ahead is not None else {}),
                **({"total_steps": self._total_steps} if self._total_steps else {}),
                **(self._wear.take_step() if self._wear is not None else {}),
                **(_speed(tokens, self._model_numel, seconds) if tokens else {}),
            },
        )
        if result.applied and not math.isfinite(result.grad_norm):
            print(f"step {number}: {result.trouble}, and the update was applied", flush=True)
        if not result.applied:
            scale = (
                "" if next_scale == result.loss_scale else f"; loss scale {result.loss_scale:.12g} -> {next_scale:.12g}"
            )
            print(f"step {number}: {result.trouble}, the update was skipped{scale}", flush=True)
        told = "loss not seen" if loss is None else f"loss {loss:.4f}"
        if self._steps_per_print and number % self._steps_per_print == 0:
            print(
                f"step {number:>5}  {told}  lr {lr[0]:.2e}  grad norm {result.grad_norm:.3f}  "
                f"{samples / seconds:.1f} samples/s",
                flush=True,
            )


def _speed(tokens: int, numel: int, seconds: float) -> dict[str, float]:
    """Tokens a second and an estimate of the model's own operations, both of the whole job.

    6 operations a parameter and token: 2 forward and 4 backward; attention and recomputation are left out.
    Source: Kaplan et al., Scaling Laws for Neural Language Models (2020), section 2.1.
    """
    rate = tokens / seconds
    # By significant digits: a small model on processors makes 1e-5 TFLOP/s.
    return {"tokens_per_s": float(f"{rate:.6g}"), "tflops": float(f"{6 * numel * rate / 1e12:.6g}")}
