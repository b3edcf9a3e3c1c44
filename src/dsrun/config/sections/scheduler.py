"""Schema of `scheduler`: types, and the typed parameters of each."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from dsrun.config.knob import Auto, Choices, Section, knob
from dsrun.config.sections.scheduler_torch import (
    ConstantParams,
    CosineParams,
    CosineRestartsParams,
    ExponentialParams,
    LinearParams,
    MultiStepParams,
    OneCycleLRParams,
    PolynomialParams,
    StepParams,
)
from dsrun.config.values import Count, Flag, Fraction, NonNegative, Positive

_STEPS = "Updates over which the rate rises; 0 or 1 count as 2, as DeepSpeed counts."
_TYPE = "Shape of the rise: `linear`, or `log` which rises fast at first."
_TOTAL = "Updates of the whole run: not micro steps, and not per GPU."
_MIN = "Rate at the start of warm-up."
_MAX = "Rate at the end of warm-up; none takes the optimizer's `lr`."


class WarmupParams(Section):
    """Parameters of WarmupLR: rise, then stay."""

    warmup_min_lr: Annotated[NonNegative, knob(_MIN, auto=Auto.DEFAULT, users=(73, 24))] = 0.0
    warmup_max_lr: Annotated[NonNegative | None, knob(_MAX, auto=Auto.OPTIMIZER_LR, users=(84, 24))] = None
    warmup_num_steps: Annotated[Count, knob(_STEPS, unit="updates", users=(90, 24))] = 1000
    warmup_type: Annotated[Literal["log", "linear"], knob(_TYPE, users=(21, 2))] = "log"


class WarmupDecayParams(WarmupParams):
    """Parameters of WarmupDecayLR: rise, then fall in a straight line to the minimum."""

    total_num_steps: Annotated[Positive, knob(_TOTAL, unit="updates", users=(59, 13))]
    warmup_max_lr: Annotated[
        NonNegative | None,
        knob(_MAX, auto=Auto.OPTIMIZER_LR, differs="0.001, whatever the optimizer's `lr` is", users=(84, 24)),
    ] = None


class WarmupCosineParams(Section):
    """Parameters of WarmupCosineLR: rise, then fall along a cosine. Rates are shares of the optimizer's `lr`."""

    removed: ClassVar = {
        "warmup_max_lr": "drop it; the maximum is the optimizer's `lr`",
        "warmup_min_lr": "write `warmup_min_ratio`, a share of the optimizer's `lr`",
    }

    total_num_steps: Annotated[Positive, knob(_TOTAL, unit="updates", users=(59, 13))]
    warmup_min_ratio: Annotated[Fraction, knob("Share of `lr` at the start of warm-up.", unit="fraction")] = 0.0
    warmup_num_steps: Annotated[Count, knob(_STEPS, unit="updates", users=(90, 24))] = 1000
    cos_min_ratio: Annotated[Fraction, knob("Share of `lr` at the end of the run.", unit="fraction")] = 1e-4
    warmup_type: Annotated[Literal["log", "linear"], knob(_TYPE, users=(21, 2))] = "log"


class OneCycleParams(Section):
    """Parameters of OneCycle: rise, fall, then decay, with momentum the other way."""

    cycle_min_lr: Annotated[NonNegative, knob("Rate at both ends of the cycle.")]
    cycle_max_lr: Annotated[NonNegative, knob("Rate at the peak.")]
    decay_lr_rate: Annotated[NonNegative, knob("How fast the rate falls after the cycle.")] = 0.0
    cycle_first_step_size: Annotated[Positive, knob("Updates of the rise.", unit="updates")] = 2000
    cycle_second_step_size: Annotated[
        Positive | None, knob("Updates of the fall; none takes those of the rise.", unit="updates")
    ] = None
    cycle_first_stair_count: Annotated[
        Count, knob("Stairs of the rise, on which the rate stays; 0: it moves with every update.", unit="stairs")
    ] = 0
    cycle_second_stair_count: Annotated[
        Count | None, knob("Stairs of the fall; none takes those of the rise.", unit="stairs")
    ] = None
    decay_step_size: Annotated[Count, knob("Updates between two decays; 0 for none.", unit="updates")] = 0
    cycle_momentum: Annotated[Flag, knob("Move momentum against the rate.")] = True
    cycle_min_mom: Annotated[Fraction, knob("Momentum at the peak.")] = 0.8
    cycle_max_mom: Annotated[Fraction, knob("Momentum at both ends.")] = 0.9
    decay_mom_rate: Annotated[NonNegative, knob("How fast momentum changes after the cycle.")] = 0.0


class RangeTestParams(Section):
    """Parameters of LRRangeTest: a rate that only rises, to find where training breaks."""

    lr_range_test_min_lr: Annotated[NonNegative, knob("Rate at the start.")] = 1e-3
    lr_range_test_step_size: Annotated[Positive, knob("Updates between two rises.", unit="updates")] = 2000
    lr_range_test_step_rate: Annotated[NonNegative, knob("Share of the start added by each rise.")] = 1.0
    lr_range_test_staircase: Annotated[Flag, knob("Rise in stairs and not in a line.")] = False


#: Types this version builds, with the model of their parameters.
_BUILT: Mapping[str, type[Section]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": RangeTestParams,
    "StepLR": StepParams,
    "MultiStepLR": MultiStepParams,
    "ConstantLR": ConstantParams,
    "LinearLR": LinearParams,
    "ExponentialLR": ExponentialParams,
    "PolynomialLR": PolynomialParams,
    "CosineAnnealingLR": CosineParams,
    "CosineAnnealingWarmRestarts": CosineRestartsParams,
    "OneCycleLR": OneCycleLRParams,
}

#: torch's that take functions, measures or other schedulers, which a config cannot say.
_UNSAID = ("ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "CyclicLR")

SCHEDULERS = Choices(noun="scheduler", models=_BUILT, planned=dict.fromkeys(_UNSAID))


class SchedulerSection(Section):
    """The learning-rate scheduler, unless the script hands one to `initialize`; stepped once per update."""

    type: Annotated[
        str,
        knob(
            "Scheduler by name: WarmupLR (rise, stay), WarmupDecayLR (rise, fall in a line), WarmupCosineLR, OneCycle, "
            "LRRangeTest, or one of torch's.",
            users=(90, 24),
            expects="the name of a scheduler",
        ),
    ]
    params: Annotated[
        WarmupDecayParams
        | WarmupParams
        | WarmupCosineParams
        | OneCycleParams
        | RangeTestParams
        | StepParams
        | MultiStepParams
        | ConstantParams
        | LinearParams
        | ExponentialParams
        | PolynomialParams
        | CosineParams
        | CosineRestartsParams
        | OneCycleLRParams,
        knob("Parameters of the scheduler.", choices=SCHEDULERS, users=(90, 24)),
    ]
