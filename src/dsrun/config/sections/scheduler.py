"""Schema of `scheduler`: types, and the typed parameters of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from dsrun.config.knob import Auto, Choices, Section, knob
from dsrun.config.values import Count, Fraction, NonNegative, Positive

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


class WarmupDecayParams(Section):
    """Parameters of WarmupDecayLR: rise, then fall in a straight line to the minimum."""

    total_num_steps: Annotated[Positive, knob(_TOTAL, unit="updates", users=(59, 13))]
    warmup_min_lr: Annotated[NonNegative, knob(_MIN, auto=Auto.DEFAULT, users=(73, 24))] = 0.0
    warmup_max_lr: Annotated[
        NonNegative | None,
        knob(_MAX, auto=Auto.OPTIMIZER_LR, differs="0.001, whatever the optimizer's `lr` is", users=(84, 24)),
    ] = None
    warmup_num_steps: Annotated[Count, knob(_STEPS, unit="updates", users=(90, 24))] = 1000
    warmup_type: Annotated[Literal["log", "linear"], knob(_TYPE, users=(21, 2))] = "log"


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


#: Types this version builds, with the model of their parameters.
_BUILT: Mapping[str, type[Section]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
}

#: Types the schema knows and a later version builds: DeepSpeed's other two, and those of torch.
_PLANNED = (
    "OneCycle",
    "LRRangeTest",
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "PolynomialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "OneCycleLR",
    "ReduceLROnPlateau",
    "LambdaLR",
    "MultiplicativeLR",
)


SCHEDULERS = Choices(noun="scheduler", models=_BUILT, planned=_PLANNED)


class SchedulerSection(Section):
    """The learning-rate scheduler, unless the script hands one to `initialize`; stepped once per update."""

    type: Annotated[
        str,
        knob(
            "Scheduler by name: WarmupLR (rise, stay), WarmupDecayLR (rise, fall in a line), WarmupCosineLR.",
            users=(90, 24),
            expects="the name of a scheduler",
        ),
    ]
    params: Annotated[
        WarmupParams | WarmupDecayParams | WarmupCosineParams,
        knob("Parameters of the scheduler.", choices=SCHEDULERS, users=(90, 24)),
    ]
