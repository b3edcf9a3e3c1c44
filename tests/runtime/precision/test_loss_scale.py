"""The loss scale is the one that DeepSpeed would have after every step, and goes on from a checkpoint."""

from __future__ import annotations

import json

import pytest

from dsrun.errors import ModelError
from dsrun.runtime.precision.loss_scale import LossScale, ScaleRules


def dynamic(window: int, hysteresis: int, consecutive: bool, minimum: float) -> LossScale:
    return LossScale(
        rules=ScaleRules(
            initial=16.0, window=window, hysteresis=hysteresis, consecutive=consecutive, minimum=float(minimum)
        )
    )


def follow(scale: LossScale, steps: str) -> list[float]:
    """Scales after each step; `x` is a step that overflows, `.` a clean one."""
    found: list[float] = []
    for step in steps:
        scale.follow(overflow=step == "x", at="", what="")
        found.append(scale.value)
    return found


#: (window, hysteresis, consecutive, minimum), steps, and what DeepSpeed 0.19.8's DynamicLossScaler gives after each.
EXPECTED = [
    ((2, 1, False, 1), ".....x....", [16, 16, 32, 32, 64, 32, 32, 32, 64, 64]),
    ((2, 2, False, 1), "x.x.....xx", [16, 16, 8, 8, 8, 16, 16, 32, 32, 16]),
    ((2, 2, True, 1), "x.x.xx....", [16, 16, 16, 16, 16, 8, 8, 8, 16, 16]),
    ((1, 2, False, 4), "...xx.x..", [16, 32, 64, 64, 32, 32, 16, 16, 32]),
    ((1000, 1, False, 3), "xx.x", [8, 4, 4, 3]),
]


@pytest.mark.parametrize(("rules", "steps", "scales"), EXPECTED)
def test_a_dynamic_scale_follows_overflows_as_deepspeeds_does(
    rules: tuple[int, int, bool, float], steps: str, scales: list[float]
) -> None:
    assert follow(dynamic(*rules), steps) == scales


@pytest.mark.parametrize(("rules", "steps", "scales"), EXPECTED)
def test_a_scale_that_was_saved_goes_on_as_if_it_had_not_been(
    rules: tuple[int, int, bool, float], steps: str, scales: list[float]
) -> None:
    for stop in range(len(steps)):
        first, second = dynamic(*rules), dynamic(*rules)
        before = follow(first, steps[:stop])
        second.load(json.loads(json.dumps(first.to_json())))
        assert before + follow(second, steps[stop:]) == scales


def test_an_overflow_at_the_minimum_ends_the_run_and_says_which_gradient_it_was() -> None:
    scale = dynamic(3, 3, False, 8)
    assert follow(scale, "xxx") == [16, 16, 8], "the hysteresis stays used up"
    with pytest.raises(ModelError) as caught:
        scale.follow(overflow=True, at=" at step 4, micro step 1", what="the gradient of `head.weight` is not finite")
    assert str(caught.value).startswith(
        "fp16: the gradient of `head.weight` is not finite at step 4, micro step 1, "
        "and the loss scale is at its minimum 8 already"
    )
    assert (scale.value, scale.state.steps) == (8, 3)


def test_a_fixed_scale_never_changes_and_takes_nothing_from_a_checkpoint() -> None:
    scale = LossScale(128.0)
    assert follow(scale, "x..x" * 3) == [128.0] * 12
    assert scale.to_json() is None
    scale.load(dynamic(1, 1, False, 1).to_json())
    assert (scale.value, scale.is_dynamic) == (128.0, False)
    assert LossScale().value == 1.0


def test_a_dynamic_scale_starts_anew_from_a_checkpoint_that_has_none() -> None:
    scale = dynamic(1, 1, False, 1)
    scale.load(None)
    assert (scale.value, scale.state.steps) == (16.0, 0)
