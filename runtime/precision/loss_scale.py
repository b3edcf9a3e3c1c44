"""The factor by which fp16's loss is multiplied so that small gradients do not vanish, and how it follows overflows.

Knows nothing of gradients: it is told of each step whether they were finite. All ranks are told the same, so all have
the same scale.

[Note: the dynamic scale]
Arithmetic and counts are DeepSpeed's, so that a run goes on there with the scale it would have had:
- An overflow halves the scale, but only if `hysteresis` is used up; otherwise it takes one of it. At the minimum the
  next such overflow ends the run.
- After an overflow, the scale doubles with the (window + 1)-th clean step, and again every `window` clean steps. The
  first step counts as if one before it had overflowed. That refills the hysteresis; with `consecutive` every clean
  step does.

Source: DeepSpeed 0.19, deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale; Micikevicius et al.,
Mixed Precision Training (2018), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dsrun.errors import ModelError

_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRules:
    """How a dynamic scale follows overflows, see [Note: the dynamic scale].

    Attributes:
        initial: scale at the first step.
        window: clean steps between two doublings.
        hysteresis: overflows that it takes to halve the scale the first time.
        consecutive: every clean step refills the hysteresis.
        minimum: the scale never falls below it.
    """

    initial: float
    window: int
    hysteresis: int
    consecutive: bool
    minimum: float


@dataclass(frozen=True, slots=True)
class ScaleState:
    """Where a scale is.

    Attributes:
        scale: scale that the next losses are multiplied by.
        hysteresis: overflows until it is halved; 1: the next one does it.
        steps: optimizer steps so far, skipped ones included.
        last_overflow: number of the last step that overflowed, from 0 on; -1 for none.
    """

    scale: float
    hysteresis: int = 1
    steps: int = 0
    last_overflow: int = -1


def after_step(state: ScaleState, rules: ScaleRules, *, overflow: bool) -> ScaleState:
    """Returns the state after one optimizer step, see [Note: the dynamic scale].

    Args:
        state: state before the step.
        rules: rules of the dynamic scale.
        overflow: a gradient of the step was inf or nan.
    """
    scale, hysteresis, last_overflow = state.scale, state.hysteresis, state.last_overflow
    if overflow:
        last_overflow = state.steps
        if hysteresis == 1:
            scale = max(scale / _FACTOR, rules.minimum)
        else:
            hysteresis -= 1
    else:
        clean_before = state.steps - last_overflow - 1
        grows = clean_before > 0 and clean_before % rules.window == 0
        scale = scale * _FACTOR if grows else scale
        hysteresis = rules.hysteresis if grows or rules.consecutive else hysteresis
    return ScaleState(scale, hysteresis, state.steps + 1, last_overflow)


class LossScale:
    """The loss scale of one engine: dynamic, fixed, or 1 where no fp16 is trained.

    Args:
        fixed: the scale, where it never changes.
        rules: rules of a dynamic scale, used in place of `fixed`; None for a scale that never changes.
    """

    def __init__(self, fixed: float = 1.0, *, rules: ScaleRules | None = None) -> None:
        self._rules = rules
        self._state = ScaleState(fixed) if rules is None else ScaleState(rules.initial, rules.hysteresis)

    @property
    def value(self) -> float:
        """By which the loss is multiplied now."""
        return self._state.scale

    @property
    def is_dynamic(self) -> bool:
        """Whether it follows overflows."""
        return self._rules is not None

    @property
    def state(self) -> ScaleState:
        """Where it is."""
        return self._state

    def follow(self, *, overflow: bool, at: str, what: str) -> None:
        """Takes note of one optimizer step.

        Args:
            overflow: a gradient of it was inf or nan, so its update was left out.
            at: text that names the step, for the error: ` at step 3, micro step 1`.
            what: text that names the gradient, for the error.

        Raises:
            ModelError: it overflowed with the scale at its minimum; the scale stays as it was.
        """
        if self._rules is None:
            self._state = replace(self._state, steps=self._state.steps + 1)
            return
        if overflow and self._state.hysteresis == 1 and self._state.scale == self._rules.minimum:
            raise ModelError(
                f"fp16: {what}{at}, and the loss scale is at its minimum {self.value:g} already",
                hint="it is no overflow of fp16 that a smaller scale could end: lower the learning rate, look at the "
                "data of this step, or train in bf16",
            )
        self._state = after_step(self._state, self._rules, overflow=overflow)

    def to_json(self) -> dict[str, Any] | None:
        """Returns the state for a checkpoint; None where it is fixed."""
        return None if self._rules is None else asdict(self._state)

    def load(self, values: Mapping[str, Any] | None) -> None:
        """Takes over what `to_json` returned; a fixed scale stays as it is, and so does one that has nothing to take.

        Args:
            values: None in checkpoints of runs that had no dynamic scale.
        """
        if self._rules is not None and values is not None:
            self._state = ScaleState(
                float(values["scale"]), int(values["hysteresis"]), int(values["steps"]), int(values["last_overflow"])
            )
